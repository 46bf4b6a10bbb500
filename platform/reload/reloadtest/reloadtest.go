// Package reloadtest is what tests of files that are read anew share.
package reloadtest

import (
	"context"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"watershed.dev/platform/reload"
)

// timeout is how long a change may take to be read: nothing but a lost notification takes longer.
const timeout = 10 * time.Second

// Replace makes a file say a text, at once: it is never there in part.
func Replace(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// Watch has files followed until the test ends.
func Watch(t testing.TB, files *reload.Files) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		files.Run(ctx)
		close(done)
	}()
	t.Cleanup(func() { cancel(); <-done })
}

// Until waits until something is so; it fails the test where that does not come.
func Until(t testing.TB, name string, condition func() bool) {
	t.Helper()
	const interval = 5 * time.Millisecond // how often it is looked whether it is so
	for deadline := time.Now().Add(timeout); !condition(); time.Sleep(interval) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", timeout, name)
		}
	}
}

// WaitForPage waits until files show a text.
func WaitForPage(t testing.TB, files *reload.Files, text string) {
	t.Helper()
	Until(t, text, func() bool {
		w := httptest.NewRecorder()
		files.ServeHTTP(w, nil)
		return strings.Contains(w.Body.String(), text)
	})
}
