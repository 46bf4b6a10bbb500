package list

import (
	"path"
	"strings"
	"testing"
)

// A token leads to a place under the list's own prefix, or to registry; one that is made comes back as it was.
func FuzzContinue(f *testing.F) {
	f.Add(encodeContinue(12, "/ns/name\x00"))
	f.Add("eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiIvLi4vc2VjcmV0cyJ9")
	f.Fuzz(func(t *testing.T, token string) {
		revision, start, err := decodeContinue(token)
		if err != nil {
			return
		}
		if revision <= 0 || strings.HasPrefix(start, "/") || path.Clean("/"+start) != "/"+start {
			t.Errorf("%q leads to %q at %d", token, start, revision)
		}
	})
}
