package reload_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"watershed.dev/platform/reload"
	"watershed.dev/platform/reload/reloadtest"
)

func TestFilesAreReloaded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	reloadtest.Replace(t, path, "first")
	applied := make(chan string, 10)
	f := &reload.Files{}
	if err := f.LoadAndWatch(t.Context(), "some-file", path, func(_ context.Context, data []byte) error {
		if strings.HasPrefix(string(data), "bad") {
			return errors.New("it is bad")
		}
		applied <- string(data)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	reloadtest.Watch(t, f)
	next := func(want string) {
		t.Helper()
		reloadtest.Until(t, want+" is applied", func() bool { return len(applied) > 0 && <-applied == want })
	}
	next("first")
	reloadtest.Replace(t, path, "second")
	next("second")
	reloadtest.WaitForPage(t, f, "[+]some-file")
	reloadtest.Replace(t, path, "bad")
	reloadtest.WaitForPage(t, f, "[-]some-file "+path+" refused: it is bad; in force is what was read")
	reloadtest.Replace(t, path, "second") // the active content
	reloadtest.WaitForPage(t, f, "[+]some-file")
	reloadtest.Replace(t, path, "third")
	next("third")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	for _, read := range []func() error{
		func() error { return f.Watch("some-file", path, nil) },
		func() error { return f.LoadAndWatch(t.Context(), "some-file", path, nil) },
	} {
		if err := read(); err == nil || !strings.Contains(err.Error(), "--some-file") {
			t.Errorf("%v", err)
		}
	}
}

func TestABadFileFailsTheStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	reloadtest.Replace(t, path, "bad")
	err := new(reload.Files).LoadAndWatch(t.Context(), "some-file", path, func(context.Context, []byte) error {
		return errors.New("it is bad")
	})
	if err == nil || !strings.Contains(err.Error(), `--some-file "`+path+`": it is bad`) {
		t.Errorf("%v", err)
	}
}
