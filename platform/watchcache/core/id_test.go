package core

import (
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

func TestIDsComeBackAsTheyWere(t *testing.T) {
	for _, e := range []*logv1.Event{
		{Type: logv1.Type_TYPE_ADDED, Revision: 12, Index: 3},
		{Revision: 13},
		{Type: logv1.Type_TYPE_RESET, Revision: 14},
		{Type: logv1.Type_TYPE_RESET, Revision: 15, Index: 4, StorageResource: "secrets"},
	} {
		id := IDOf(e, "ABC-1")
		got, err := ParseID(id.String())
		if err != nil || got != id {
			t.Errorf("%+v came back as %+v (%v)", id, got, err)
		}
		if progress := e.Type == logv1.Type_TYPE_UNSPECIFIED || e.Type == logv1.Type_TYPE_RESET &&
			e.StorageResource == ""; got.Progress != progress {
			t.Errorf("%v: mark is %v", e, got.Progress)
		}
	}
	for _, bad := range []string{"", "x", "1", "1.2", "m.1.x", "a.b.c"} {
		if id, err := ParseID(bad); err == nil {
			t.Errorf("%q is %+v", bad, id)
		}
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("m12.0.ABC-1")
	f.Add("12.3.x")
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseID(s)
		if err != nil {
			return
		}
		if again, err := ParseID(id.String()); err != nil || again != id {
			t.Errorf("%q is %+v, and then %+v (%v)", s, id, again, err)
		}
	})
}
