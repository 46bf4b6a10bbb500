package apiclient

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/rest"
)

// A service calls the gateway of its process as its own user, and otherwise needs a kubeconfig.
func TestConfig(t *testing.T) {
	if _, err := Config(nil, "", "authz"); err == nil || !strings.HasPrefix(err.Error(), "--kubeconfig is required") {
		t.Errorf("without a gateway: %v", err)
	}
	gateway := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u, _ := request.UserFrom(r.Context())
		fmt.Fprint(w, u.GetName(), u.GetGroups(), r.UserAgent())
	})
	conf, err := Config(gateway, "/none", "authz")
	if err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(conf)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, conf.Host+"/api", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	const want = "system:watershed:authz[system:watershed system:authenticated]kube-apiserver/"
	if err != nil || !strings.HasPrefix(string(got), want) {
		t.Errorf("%s, %v", got, err)
	}
}
