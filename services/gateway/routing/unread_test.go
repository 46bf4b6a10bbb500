package routing

import "testing"

func TestUnreadListsAreBounded(t *testing.T) {
	var u unreadLists
	for i, step := range []struct {
		owner string
		n     int
		want  bool
	}{
		{"a", 2 * maxOwnUnread, true}, // a single list
		{"a", 1, false},
		{"b", maxOwnUnread, true},
		{"b", 1, false},
		{"c", maxUnread - 3*maxOwnUnread, true},
		{"d", 1, false},
	} {
		if got := u.acquire(step.owner, step.n); got != step.want {
			t.Errorf("step %d: %v", i, got)
		}
	}
	u.release("a", 2*maxOwnUnread)
	if !u.acquire("a", maxOwnUnread) || !u.acquire("d", maxOwnUnread) {
		t.Error("a released list still counts")
	}
}
