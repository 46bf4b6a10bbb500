package authn

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"

	"watershed.dev/platform/reload"
)

func bearer(t *testing.T, token string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	return req
}

func TestAFileOfTokensIsReadAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens.csv")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	write("first,alice,1\n")
	files := &reload.Files{}
	_, auth, err := newChain(t.Context(), kubeauthenticator.Config{
		TokenAuthFile:        path,
		TokenSuccessCacheTTL: time.Hour,
		Anonymous:            apiserverconfig.AnonymousAuthConfig{Enabled: true},
	}, "", files)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		files.Run(ctx)
		close(done)
	}()
	defer func() { cancel(); <-done }()
	knows := func(token string) bool {
		_, ok, err := auth.AuthenticateRequest(bearer(t, token))
		if !ok && err == nil {
			t.Errorf("%s is a stranger's", token)
		}
		return ok
	}
	until := func(token string) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !knows(token); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s is not known", token)
			}
		}
	}
	before := testutil.ToFloat64(attempts.WithLabelValues("tokenfile", "success"))
	if !knows("first") || testutil.ToFloat64(attempts.WithLabelValues("tokenfile", "success")) != before+1 {
		t.Error("the first token is not known, or not counted")
	}
	write("second,alice,1\n")
	until("second")
	if knows("first") {
		t.Error("a token that the file has no more is known")
	}
	write("no columns\n")
	for shown := ""; !strings.Contains(shown, "refused"); time.Sleep(5 * time.Millisecond) {
		w := httptest.NewRecorder()
		files.ServeHTTP(w, nil)
		shown = w.Body.String()
	}
	if !knows("second") {
		t.Error("a bad file was put in force")
	}
	if resp, ok, err := auth.AuthenticateRequest(&http.Request{Header: http.Header{}}); !ok || err != nil ||
		resp.User.GetName() != "system:anonymous" {
		t.Errorf("without a token: %v, %v, %v", resp, ok, err)
	}
}

// A token that comes over a WebSocket may be any text: what a header would end at must not be cut off.
func TestATokenIsAskedAboutWhole(t *testing.T) {
	known := tokenOf{authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		return &authenticator.Response{}, strings.Fields(req.Header.Get("Authorization"))[1] == "good", nil
	})}
	for token, want := range map[string]bool{"good": true, "good and more": false, "bad": false} {
		if _, ok, err := known.AuthenticateToken(t.Context(), token); ok != want || err != nil {
			t.Errorf("%q is known: %v, %v", token, ok, err)
		}
	}
}
