package reload

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestWhatMayRecoverIsTriedAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	tries := 0
	f := &file{flag: "x", path: path, seen: []byte("old"), inForce: []byte("old"),
		apply: func(context.Context, []byte) error {
			if tries++; tries == 1 {
				return MayRecover(errors.New("nobody answers"))
			}
			return nil
		}}
	if err := f.reload(t.Context()); !errors.As(err, new(mayRecover)) {
		t.Errorf("%v", err)
	}
	if err := f.reload(t.Context()); err != nil || string(f.inForce) != "new" {
		t.Errorf("%v, %q", err, f.inForce)
	}
}
