package watch

import (
	"fmt"
	"testing"
)

// A user is over its share with what its own watches hold, and with little once all users together hold too much.
func TestUnsentIsCountedByUser(t *testing.T) {
	all := &Unsent{}
	loud, quiet := all.join("loud"), all.join("quiet")
	if all.join("loud") != loud {
		t.Error("watches of one user count apart")
	}
	loud.leave()
	if loud.hold(unsentShare) || quiet.hold(1) {
		t.Error("a user within the share is over it")
	}
	if !loud.hold(1) || quiet.hold(1) {
		t.Error("a user is over the share with what it holds itself, and with nothing else")
	}
	loud.hold(unsentBytes)
	if quiet.hold(leastShare) {
		t.Error("one user alone takes the others' shares")
	}
	var crowd []*unsent
	for n := range unsentBytes / unsentShare {
		o := all.join(fmt.Sprint(n))
		o.hold(unsentShare)
		crowd = append(crowd, o)
	}
	if quiet.hold(-2) || !quiet.hold(2) {
		t.Error("beyond the bound a user has the least share")
	}
	for _, o := range crowd {
		o.hold(-unsentShare)
		o.leave()
	}
	loud.hold(-unsentBytes - unsentShare - 1)
	if quiet.hold(-2 - leastShare); loud.hold(1) || all.total != 1 {
		t.Errorf("%d bytes stay", all.total)
	}
	loud.leave()
	quiet.leave()
	if len(all.of) != 0 {
		t.Errorf("%d users stay", len(all.of))
	}
	for _, o := range []*unsent{all.join(""), (*Unsent)(nil).join("a")} {
		if o.hold(unsentBytes * 2) {
			t.Error("it has a bound")
		}
		o.leave()
	}
}
