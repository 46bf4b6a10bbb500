package list

import (
	"path"
	"strings"
	"testing"
)

// A continue token decodes to a key under the list's own prefix, or is delegated. An encoded token decodes to the same
// key.
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
