package authn

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"

	"watershed.dev/platform/reload"
	"watershed.dev/platform/reload/reloadtest"
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

func TestATokenFileIsReloaded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens.csv")
	reloadtest.Replace(t, path, "first,alice,1\n")
	files := &reload.Files{}
	_, auth, err := newChain(t.Context(), kubeauthenticator.Config{
		TokenAuthFile:        path,
		TokenSuccessCacheTTL: time.Hour,
		Anonymous:            apiserverconfig.AnonymousAuthConfig{Enabled: true},
	}, "", files)
	if err != nil {
		t.Fatal(err)
	}
	reloadtest.Watch(t, files)
	knows := func(token string) bool {
		_, ok, err := auth.AuthenticateRequest(bearer(t, token))
		if !ok && err == nil {
			t.Errorf("%s is not accepted", token)
		}
		return ok
	}
	before := testutil.ToFloat64(attempts.WithLabelValues("tokenfile", "success"))
	if !knows("first") || testutil.ToFloat64(attempts.WithLabelValues("tokenfile", "success")) != before+1 {
		t.Error("the first token is not accepted, or not counted")
	}
	reloadtest.Replace(t, path, "second,alice,1\n")
	reloadtest.Until(t, "the second token is known", func() bool { return knows("second") })
	reloadtest.Until(t, "a token that the file has no more is forgotten", func() bool { return !knows("first") })
	reloadtest.Replace(t, path, "no columns\n")
	reloadtest.WaitForPage(t, files, "refused")
	if !knows("second") {
		t.Error("an invalid file was applied")
	}
	if resp, ok, err := auth.AuthenticateRequest(&http.Request{Header: http.Header{}}); !ok || err != nil ||
		resp.User.GetName() != "system:anonymous" {
		t.Errorf("without a token: %v, %v, %v", resp, ok, err)
	}
}

// A long token is invalid, also if a file has it.
func TestALongTokenIsInvalid(t *testing.T) {
	path, token := filepath.Join(t.TempDir(), "tokens.csv"), strings.Repeat("x", maxBearerBytes)
	reloadtest.Replace(t, path, token+",alice,1\n"+token+"y,bob,2\n")
	_, auth, err := newChain(t.Context(), kubeauthenticator.Config{TokenAuthFile: path}, "", &reload.Files{})
	if err != nil {
		t.Fatal(err)
	}
	for token, want := range map[string]bool{token: true, token + "y": false} {
		if _, ok, _ := auth.AuthenticateRequest(bearer(t, token)); ok != want {
			t.Errorf("a token of %d bytes is accepted: %v", len(token), ok)
		}
	}
}

// A token in a WebSocket subprotocol may contain any text. It must not be truncated at a character that would end it in
// a header.
func TestATokenIsNotTruncated(t *testing.T) {
	adapter := tokenAdapter{authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		return &authenticator.Response{}, strings.Fields(req.Header.Get("Authorization"))[1] == "good", nil
	})}
	for token, want := range map[string]bool{"good": true, "good and more": false, "bad": false} {
		if _, ok, err := adapter.AuthenticateToken(t.Context(), token); ok != want || err != nil {
			t.Errorf("%q is accepted: %v, %v", token, ok, err)
		}
	}
}
