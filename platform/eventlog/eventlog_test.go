package eventlog

import (
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

func TestIDsComeBackAsTheyWere(t *testing.T) {
	for _, e := range []*logv1.Event{
		{Type: logv1.Type_TYPE_ADDED, Revision: 12, Index: 3},
		{Revision: 13},
		{Type: logv1.Type_TYPE_RESET, Revision: 14},
	} {
		id := IDOf(e, "ABC-1")
		got, err := ParseID(id.String())
		if err != nil || got != id {
			t.Errorf("%+v came back as %+v (%v)", id, got, err)
		}
		if mark := e.Type == logv1.Type_TYPE_UNSPECIFIED || e.Type == logv1.Type_TYPE_RESET; got.Mark != mark {
			t.Errorf("%v: mark is %v", e, got.Mark)
		}
	}
	for _, bad := range []string{"", "x", "1", "1.2", "m.1.x", "a.b.c"} {
		if id, err := ParseID(bad); err == nil {
			t.Errorf("%q is %+v", bad, id)
		}
	}
}
