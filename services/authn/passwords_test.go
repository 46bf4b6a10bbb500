package authn

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"watershed.dev/platform/reload"
)

func hashed(t *testing.T, password string) string {
	t.Helper()
	h, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	return string(h)
}

func TestPasswordsAreKnown(t *testing.T) {
	long := strings.Repeat("p", 72)
	path := filepath.Join(t.TempDir(), "passwords.csv")
	text := "secret,alice,1,\"readers, writers\"\n" + hashed(t, "hush") + ",bob,2\n" + hashed(t, long) + ",long,3\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := newPasswords(t.Context(), path, &reload.Files{})
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		name, password string
		known          bool
	}{
		{"alice", "secret", true},
		{"alice", "Secret", false},
		{"alice", "", false},
		{"alice", "secretsecret", false},
		{"bob", "hush", true},
		{"bob", "hus", false},
		{"bob", strings.Split(text, ",")[3], false},
		{"long", long, true},
		{"long", long + "more", false}, // bcrypt ignores the bytes after maxHashed
		{"carol", "secret", false},
		{"", "", false},
	} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		req.SetBasicAuth(x.name, x.password)
		resp, ok, err := p.AuthenticateRequest(req)
		if ok != x.known || ok == (err != nil) {
			t.Errorf("%s:%s is accepted: %v, %v", x.name, x.password, ok, err)
			continue
		}
		if ok && (resp.User.GetName() != x.name || req.Header.Get("Authorization") != "") {
			t.Errorf("%s is %v, and its password is forwarded: %q", x.name, resp.User, req.Header)
		}
		if ok && x.name == "alice" && strings.Join(resp.User.GetGroups(), "|") != "readers|writers" {
			t.Errorf("groups are %q", resp.User.GetGroups())
		}
	}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	req.Header.Set("Authorization", "Bearer x")
	if _, ok, err := p.AuthenticateRequest(req); ok || err != nil {
		t.Errorf("a token is no password: %v, %v", ok, err)
	}
}

// A verified user does not wait behind anonymous clients. A password that was not compared is not reported as wrong.
func TestAnonymousClientsDoNotLockUsersOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "passwords.csv")
	if err := os.WriteFile(path, []byte(hashed(t, "hush")+",bob,2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := newPasswords(t.Context(), path, &reload.Files{})
	if err != nil {
		t.Fatal(err)
	}
	login := func(ctx context.Context, name, password string) (bool, error) {
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
		req.SetBasicAuth(name, password)
		_, ok, err := p.AuthenticateRequest(req)
		return ok, err
	}
	if ok, err := login(t.Context(), "bob", "hush"); !ok {
		t.Fatal(err)
	}
	for range cap(p.hashing) {
		p.hashing <- struct{}{} // anonymous clients have every slot
	}
	if ok, err := login(t.Context(), "bob", "hush"); !ok {
		t.Errorf("a login with a verified password waits: %v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if ok, err := login(short, "bob", "Hush"); ok || !errors.Is(err, errBusy) {
		t.Errorf("a password that was not compared: %v", err)
	}
	p.waiting.Store(maxWaiting)
	if ok, err := login(t.Context(), "bob", "Hush"); ok || !errors.Is(err, errBusy) {
		t.Errorf("a full queue: %v", err)
	}
}

func TestABadFileOfPasswordsIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"secret,alice\n":         "line 1: there must be at least 3 columns",
		"a,alice,1\nb,alice,2\n": `line 2: user "alice" is there twice`,
		",alice,1\n":             "line 1: the password or the user's name is empty",
		"a,,1\n":                 "line 1: the password or the user's name is empty",
		"$2a$99$x,alice,1\n":     "line 1: ",
		"$2a$31$" + strings.Repeat("x", 53) + ",alice,1\n": "line 1: a bcrypt cost of 31 takes too long",
		"\"a,alice,1\n": "quote",
	} {
		if _, err := parsePasswords([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if all, err := parsePasswords(nil); err != nil || len(all.byName) != 0 {
		t.Errorf("an empty file: %v, %v", all, err)
	}
}
