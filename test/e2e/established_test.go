package e2e

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// TestAnEstablishedCRDIsServedByEveryGateway creates CRDs. Once a watch has shown that a CRD is established, no gateway
// answers 404. A killed gateway delays Established, but not until its lease ends.
func TestAnEstablishedCRDIsServedByEveryGateway(t *testing.T) {
	t.Parallel()
	t.Run("up", func(t *testing.T) { establish(t, harness.Up(t, "")) })
	t.Run("split", func(t *testing.T) {
		s := harness.Split(t, "", "--replicas", "gateway=3,registry=2")
		define := establish(t, s)
		etcd := etcdClient(t, etcdOf(t, s))
		gateways := func() (keys []string) {
			live, err := etcd.Get(t.Context(), "/registry/watershed/gateways/", clientv3.WithPrefix(),
				clientv3.WithKeysOnly())
			if err != nil {
				t.Fatal(err)
			}
			for _, kv := range live.Kvs {
				keys = append(keys, string(kv.Key))
			}
			return keys
		}
		var before []string
		harness.Eventually(t, harness.Soon, func() error {
			if before = gateways(); len(before) != 3 {
				return fmt.Errorf("%q count as live", before)
			}
			return nil
		})
		// The killed gateway counts as live until its lease in etcd ends.
		kill(t, filepath.Join(s.Dir, "gateway-0.pid"))
		harness.Eventually(t, harness.Soon, func() error { // over a connection to another gateway
			_, err := s.Client().Discovery().ServerVersion()
			return err
		})
		if took := define(30, nil); took < 4*time.Second {
			t.Errorf("established %v after the create, with a killed gateway", took)
		}
		after := gateways()
		for _, gateway := range before {
			if !slices.Contains(after, gateway) {
				t.Errorf("established after the lease of %s had ended", gateway)
			}
		}
	})
}

// establish defines 30 CRDs, and uses each over many connections as soon as it is established. It returns a function
// that defines another CRD, uses it with clients, and returns the time until it was established.
func establish(t *testing.T, s *harness.Server) func(i int, clients []*http.Client) time.Duration {
	const connections = 9 // enough for each of three gateways to get some
	var clients []*http.Client
	for range connections {
		conf, err := rest.TLSConfigFor(s.Config())
		if err != nil {
			t.Fatal(err)
		}
		clients = append(clients, &http.Client{
			Transport: harness.Retrying(&http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true})})
	}
	send := func(c *http.Client, method, path, body string) error {
		req, err := http.NewRequestWithContext(t.Context(), method, s.Config().Host+path, strings.NewReader(body))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := c.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		got, _ := io.ReadAll(resp.Body)
		if err := harness.Failure(resp.StatusCode, string(got)); err != nil {
			return fmt.Errorf("%s %s: %w", method, path, err)
		}
		return nil
	}
	get := func(c *http.Client, path string) {
		if err := send(c, http.MethodGet, path, ""); err != nil {
			t.Error(err)
		}
	}
	crds := extensions.NewForConfigOrDie(s.Config()).ApiextensionsV1().CustomResourceDefinitions()
	define := func(i int, clients []*http.Client) time.Duration {
		plural, group := fmt.Sprintf("things%d", i), fmt.Sprintf("g%d.example.com", i%7)
		w, err := crds.Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + plural + "." + group})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		names := apiextensionsv1.CustomResourceDefinitionNames{Plural: plural, Kind: fmt.Sprintf("Thing%d", i)}
		began := time.Now()
		harness.Write(t, func() error {
			_, err := crds.Create(t.Context(), &apiextensionsv1.CustomResourceDefinition{
				ObjectMeta: metav1.ObjectMeta{
					Name:        plural + "." + group,
					Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: "{}"},
				},
				Spec: apiextensionsv1.CustomResourceDefinitionSpec{
					Group: group, Names: names, Scope: apiextensionsv1.ClusterScoped,
					Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
						Name: "v1", Served: true, Storage: true,
						Schema: &apiextensionsv1.CustomResourceValidation{
							OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object"}}}},
				},
			}, metav1.CreateOptions{})
			return err
		})
		for {
			d, ok := next(t, w).Object.(*apiextensionsv1.CustomResourceDefinition)
			if !ok {
				t.Fatal("the watch of a CRD ended")
			}
			if apihelpers.IsCRDConditionTrue(d, apiextensionsv1.Established) {
				if d.Annotations[corev1.LastAppliedConfigAnnotation] != "{}" || d.ManagedFields[0].Subresource != "" {
					t.Errorf("the controllers have changed the metadata: %v, %v", d.Annotations, d.ManagedFields)
				}
				break
			}
		}
		took := time.Since(began)
		path := fmt.Sprintf("/apis/%s/v1/%s", group, plural)
		var wg sync.WaitGroup
		for n, c := range clients {
			wg.Go(func() {
				name := fmt.Sprint("at-", n)
				get(c, path)
				harness.TryWrite(t, func() error {
					return send(c, http.MethodPost, path, fmt.Sprintf(`{"apiVersion":"%s/v1","kind":%q,`+
						`"metadata":{"name":%q}}`, group, names.Kind, name))
				})
				get(c, path+"/"+name)
			})
		}
		wg.Wait()
		return took
	}
	var took []time.Duration
	for i := range 30 {
		took = append(took, define(i, clients))
	}
	slices.Sort(took)
	t.Logf("from the create to Established: p50 %v, at most %v", took[15], took[29])
	return define
}
