// Package reloadtest has helpers for tests of reloaded files.
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

// timeout bounds the wait for a reload. Only a lost notification takes longer.
const timeout = 10 * time.Second

// Replace replaces the content of a file atomically.
func Replace(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// Watch runs files until the test ends.
func Watch(t testing.TB, files *reload.Files) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		files.Run(ctx)
		close(done)
	}()
	t.Cleanup(func() { cancel(); <-done })
}

// Until waits until condition is true. It fails the test after timeout.
func Until(t testing.TB, name string, condition func() bool) {
	t.Helper()
	const interval = 5 * time.Millisecond // between two checks
	for deadline := time.Now().Add(timeout); !condition(); time.Sleep(interval) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", timeout, name)
		}
	}
}

// WaitForPage waits until the page of files contains a text.
func WaitForPage(t testing.TB, files *reload.Files, text string) {
	t.Helper()
	Until(t, text, func() bool {
		w := httptest.NewRecorder()
		files.ServeHTTP(w, nil)
		return strings.Contains(w.Body.String(), text)
	})
}
