package watch

import (
	"fmt"
	"testing"
)

// A user is over its share with what its own watches hold, and with little once all users together hold too much.
func TestInflightQuotaIsPerUser(t *testing.T) {
	quota := &InflightQuota{}
	loud, quiet := quota.join("loud"), quota.join("quiet")
	if quota.join("loud") != loud {
		t.Error("watches of one user count apart")
	}
	loud.leave()
	if loud.account(maxOwnerBytes) || quiet.account(1) {
		t.Error("a user within the share is over it")
	}
	if !loud.account(1) || quiet.account(1) {
		t.Error("a user is over the share with what it holds itself, and with nothing else")
	}
	loud.account(maxInflightBytes)
	if quiet.account(minOwnerBytes) {
		t.Error("one user alone takes the others' shares")
	}
	var crowd []*ownerQuota
	for n := range maxInflightBytes / maxOwnerBytes {
		o := quota.join(fmt.Sprint(n))
		o.account(maxOwnerBytes)
		crowd = append(crowd, o)
	}
	if quiet.account(-2) || !quiet.account(2) {
		t.Error("beyond the bound a user has the least share")
	}
	for _, o := range crowd {
		o.account(-maxOwnerBytes)
		o.leave()
	}
	loud.account(-maxInflightBytes - maxOwnerBytes - 1)
	if quiet.account(-2 - minOwnerBytes); loud.account(1) || quota.total != 1 {
		t.Errorf("%d bytes stay", quota.total)
	}
	loud.leave()
	quiet.leave()
	if len(quota.owners) != 0 {
		t.Errorf("%d users stay", len(quota.owners))
	}
	for _, o := range []*ownerQuota{quota.join(""), (*InflightQuota)(nil).join("a")} {
		if o.account(maxInflightBytes * 2) {
			t.Error("it has a bound")
		}
		o.leave()
	}
}
