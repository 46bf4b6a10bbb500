package reload

import (
	"context"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestAFileIsReadAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	write := func(text string) {
		t.Helper()
		next := path + ".new"
		if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, path); err != nil {
			t.Fatal(err)
		}
	}
	write("first")
	applied := make(chan string, 10)
	f := &Files{}
	initial, err := f.Read("some-file", path, func(_ context.Context, data []byte) error {
		if strings.HasPrefix(string(data), "bad") {
			return errors.New("it is bad")
		}
		applied <- string(data)
		return nil
	})
	if err != nil || string(initial) != "first" {
		t.Fatalf("%q, %v", initial, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		f.Run(ctx)
		close(done)
	}()
	page := func() string {
		w := httptest.NewRecorder()
		f.ServeHTTP(w, nil)
		return w.Body.String()
	}
	until := func(text string) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !strings.Contains(page(), text); {
			if time.Now().After(deadline) {
				t.Fatalf("no %q in %s", text, page())
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	write("second")
	if got := <-applied; got != "second" {
		t.Errorf("%q", got)
	}
	until("[+]some-file")
	write("bad")
	until("[-]some-file " + path + " refused: it is bad; in force is what was read")
	write("second") // as what is in force
	until("[+]some-file")
	write("third")
	for got := range applied {
		if got == "third" {
			break
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-done
	if _, err := f.Read("some-file", path, nil); err == nil || !strings.Contains(err.Error(), "--some-file") {
		t.Errorf("%v", err)
	}
}

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
