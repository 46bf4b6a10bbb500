package delegatedauth

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

func TestPartsAreNotMixedUp(t *testing.T) {
	seen := map[digest]string{}
	for _, parts := range [][]string{{"ab", "c"}, {"a", "bc"}, {"abc"}, {"abc", ""}, {"", "abc"}, {}} {
		d := newDigester()
		for _, p := range parts {
			d.part(p)
		}
		sum, ok := d.sum()
		if other, known := seen[sum]; known || !ok {
			t.Errorf("%q and %s are the same", parts, other)
		}
		seen[sum] = fmt.Sprintf("%q", parts)
	}
	d := newDigester()
	d.part(strings.Repeat("x", 1<<20))
	if _, ok := d.sum(); ok {
		t.Error("a megabyte is a key")
	}
}

// Two users with equal strings in groups and extra, divided differently, have different keys (S25).
func TestUsersAreNotMixedUp(t *testing.T) {
	seen := map[digest]user.Info{}
	for _, u := range []user.Info{
		&user.DefaultInfo{Name: "a", Groups: []string{"g", "extra", "k", "v"}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v"}}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v", "k2", "v2"}}},
		&user.DefaultInfo{Name: "a", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v"}, "k2": {"v2"}}},
	} {
		keys, _ := newCacheKeys(authorizer.AttributesRecord{User: u, Verb: "get", Path: "/x"})
		key := keys.exact
		if other, known := seen[key]; known {
			t.Errorf("%v and %v are the same", u, other)
		}
		seen[key] = u
	}
}

func TestCacheKeysAreDistinct(t *testing.T) {
	seen := map[digest]authorizer.Attributes{}
	for _, r := range []authorizer.Attributes{podAttributes("bob", "get"), podAttributes("bob", "list"),
		podAttributes("bo", "bget"), podAttributes("", "bobget"),
		authorizer.AttributesRecord{
			User:            &user.DefaultInfo{Name: "bob", Groups: []string{"get"}},
			ResourceRequest: true,
			Resource:        "pods",
		},
		authorizer.AttributesRecord{User: &user.DefaultInfo{Name: "bob"}, Verb: "get", Path: "/x"}} {
		keys, cacheable := newCacheKeys(r)
		k := keys.exact
		if !cacheable {
			t.Errorf("%v is not cacheable", r)
		}
		if other, ok := seen[k]; ok {
			t.Errorf("%v and %v have the same key", r, other)
		}
		seen[k] = r
	}
}
