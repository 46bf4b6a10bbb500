package xds

import (
	"os"
	"path/filepath"
	"testing"

	"watershed.dev/platform/rpc"
)

// Any bytes in the state file, or in --replicas-file, publish valid replicas or none.
func FuzzFiles(f *testing.F) {
	f.Add([]byte(`{"registry":[{"address":"192.0.2.1:1","zone":"a"}],"authz":[{"address":"nowhere"}]}`))
	f.Add([]byte("registry: [192.0.2.1:1, unix:/run/a]\nauthz: []\n"))
	f.Add([]byte("a: &a [*a]\n"))
	f.Add([]byte("{"))
	path := filepath.Join(f.TempDir(), "file")
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		check := func(s *server) {
			for service, replicas := range s.replicas {
				if len(replicas) == 0 {
					t.Errorf("%q has no replicas", service)
				}
				for _, r := range replicas {
					if _, err := rpc.ParseAddress(r.Address); err != nil {
						t.Error(err)
					}
				}
			}
		}
		check(newServer(path))
		s := newServer("")
		_ = (&fileSource{path: path, server: s}).read()
		check(s)
	})
}
