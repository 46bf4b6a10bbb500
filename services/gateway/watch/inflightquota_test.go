package watch

import (
	"fmt"
	"testing"
)

// A user is over its limit by the bytes of its own watches only. The limit is small while all users together exceed the
// quota.
func TestInflightQuotaIsPerUser(t *testing.T) {
	quota := &InflightQuota{}
	loud, quiet := quota.join("loud"), quota.join("quiet")
	if quota.join("loud") != loud {
		t.Error("watches of one user count apart")
	}
	loud.leave()
	if loud.account(maxOwnerBytes) || quiet.account(1) {
		t.Error("a user within its limit is over it")
	}
	if !loud.account(1) || quiet.account(1) {
		t.Error("a user's limit does not depend on its own bytes only")
	}
	loud.account(maxInflightBytes)
	if quiet.account(minOwnerBytes) {
		t.Error("a single user reduces the limits of others")
	}
	var crowd []*ownerQuota
	for n := range maxInflightBytes / maxOwnerBytes {
		o := quota.join(fmt.Sprint(n))
		o.account(maxOwnerBytes)
		crowd = append(crowd, o)
	}
	if quiet.account(-2) || !quiet.account(2) {
		t.Error("over the quota, the limit is not minOwnerBytes")
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
			t.Error("it has a limit")
		}
		o.leave()
	}
}
