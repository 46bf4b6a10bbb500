package apiclient

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/rest"
)

// fakeGateway responds with the user and the user agent of a request.
type fakeGateway struct{ sync.Map }

func (*fakeGateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	u, _ := request.UserFrom(r.Context())
	fmt.Fprint(w, u.GetName(), u.GetGroups(), r.UserAgent())
}

// A service calls the gateway of its process as its own user, and otherwise needs a kubeconfig.
func TestConnect(t *testing.T) {
	if _, err := Connect(nil, "", "authz"); err == nil || !strings.HasPrefix(err.Error(), "--kubeconfig is required") {
		t.Errorf("without a gateway: %v", err)
	}
	gateway := &fakeGateway{}
	conf, err := Connect(gateway, "/none", "authz")
	if err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(conf.Config)
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

// The services of a process share informers, which end when the last service ends.
func TestServicesOfAProcessShareInformers(t *testing.T) {
	gateway := &fakeGateway{}
	var clusters []*Cluster
	for _, service := range []string{"authz", "admission"} {
		conn, err := Connect(gateway, "", service)
		if err != nil {
			t.Fatal(err)
		}
		c, err := NewCluster(conn, Freshness{})
		if err != nil {
			t.Fatal(err)
		}
		clusters = append(clusters, c)
	}
	if clusters[0].Informers != clusters[1].Informers || clusters[0].Client == clusters[1].Client {
		t.Error("informers are not shared, or clients are")
	}
	first, last := clusters[0].start(), clusters[1].start()
	first()
	select {
	case <-clusters[1].stop:
		t.Error("the informers of the second service have ended")
	default:
	}
	last()
	<-clusters[1].stop
}
