package reload

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestRetryableErrorsAreRetried(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	tries := 0
	f := &file{flag: "x", path: path, seen: []byte("old"), active: []byte("old"),
		update: func(context.Context, []byte) error {
			if tries++; tries == 1 {
				return Retryable(errors.New("no response"))
			}
			return nil
		}}
	if err := f.reload(t.Context()); !errors.As(err, new(retryable)) {
		t.Errorf("%v", err)
	}
	if err := f.reload(t.Context()); err != nil || string(f.active) != "new" {
		t.Errorf("%v, %q", err, f.active)
	}
}
