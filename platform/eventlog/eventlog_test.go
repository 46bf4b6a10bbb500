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

func TestOldServersAreRefused(t *testing.T) {
	for server, want := range map[string]bool{
		"2.15.2":   false,
		"2.15.3":   false,
		"2.16.0":   false,
		"2.15.1":   true,
		"2.12.9":   true,
		"2.10.0":   true,
		"nonsense": true,
	} {
		if got := tooOld(server); got != want {
			t.Errorf("%s is too old: %v", server, got)
		}
	}
}
