package routing

import "testing"

func TestUnreadListsAreBounded(t *testing.T) {
	var u unreadLists
	large, half, small := make([]byte, 2*maxUnread), make([]byte, maxUnread/2), make([]byte, 1)
	for i, step := range []struct {
		owner string
		data  []byte
		want  bool
	}{
		{"a", large, true}, // a single list
		{"a", large, true}, // an equal request shares it
		{"a", small, false},
		{"b", half, true},
		{"b", make([]byte, maxUnread/2), true},
		{"b", small, false},
	} {
		if got := u.acquire(step.owner, step.data); got != step.want {
			t.Errorf("step %d: %v", i, got)
		}
	}
	u.release("a", large)
	if u.acquire("a", small) {
		t.Error("a list that a request still holds does not count")
	}
	u.release("a", large)
	if !u.acquire("a", small) {
		t.Error("a released list still counts")
	}
	u.release("a", small)
	if len(u.bytes) != 1 {
		t.Errorf("%v is left", u.bytes)
	}
}
