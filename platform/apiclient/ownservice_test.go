package apiclient

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/client-go/rest"
)

// A webhook at the API's own Service is called at the gateway, with any CA bundle. Its paths stay.
func TestOwnServiceIsTheGateway(t *testing.T) {
	var got []string
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		got = append(got, req.Host+req.URL.String()+" "+req.Header.Get("Authorization"))
	}))
	server.EnableHTTP2 = true // as the gateway, which rejects a relative path
	server.StartTLS()
	t.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	for _, prefix := range []string{"", "/prefix"} {
		c := &Conn{Config: &rest.Config{
			Host:            server.URL + prefix,
			BearerToken:     "t",
			TLSClientConfig: rest.TLSClientConfig{CAData: ca},
		}}
		config, err := c.OwnService()
		if err != nil {
			t.Fatal(err)
		}
		hook := rest.CopyConfig(config) // as k8s.io/apiserver/pkg/util/webhook does
		hook.Host, hook.TLSClientConfig.CAData = "https://kubernetes.default.svc:443", ca
		hook.TLSClientConfig.ServerName = "kubernetes.default.svc"
		client, err := rest.HTTPClientFor(hook)
		if err != nil {
			t.Fatal(err)
		}
		got = nil
		resp, err := client.Post(hook.Host+"/apis/a.example.com/v1/reviews?timeout=5s", "application/json", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		want := server.Listener.Addr().String() + prefix + "/apis/a.example.com/v1/reviews?timeout=5s Bearer t"
		if len(got) != 1 || got[0] != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}
