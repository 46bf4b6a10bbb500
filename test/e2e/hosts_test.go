package e2e

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// hostInformers is the number of informers of each host. With more than a single informer, TestThreeHostsShareEtcd also
// kills each host in turn.
var hostInformers = flag.Int("informers", 1, "the number of informers of each host")

// host is an API server of a control plane with several, and informers that are its clients.
type host struct {
	*harness.Server
	address string
	// lists counts the informers' lists, and seen has the names of each informer's objects.
	lists atomic.Int64
	seen  []*sync.Map
}

// follow starts informers of the host's ConfigMaps, each of which lists once unless the host loses events.
func (h *host) follow(t *testing.T) {
	for range *hostInformers {
		h.seen = append(h.seen, &sync.Map{})
		h.startInformer(t, h.seen[len(h.seen)-1])
	}
}

func (h *host) startInformer(t *testing.T, seen *sync.Map) {
	client := h.Client()
	lw := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "configmaps", "default", fields.Everything())
	counted := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			h.lists.Add(1)
			return lw.ListWithContext(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			if o.SendInitialEvents != nil && *o.SendInitialEvents {
				h.lists.Add(1)
			}
			return lw.WatchWithContext(ctx, o)
		},
	}
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(counted, client),
		ObjectType:    &corev1.ConfigMap{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: func(o any) { seen.Store(o.(*corev1.ConfigMap).Name, true) },
		},
	})
	go informer.Run(t.Context().Done())
	if !cache.WaitForCacheSync(t.Context().Done(), informer.HasSynced) {
		t.Fatal("an informer has not synced")
	}
}

// missing returns the first object that an informer lacks.
func (h *host) missing(names []string) string {
	for _, seen := range h.seen {
		for _, n := range names {
			if _, ok := seen.Load(n); !ok {
				return n
			}
		}
	}
	return ""
}

// expectLists reports an error unless each informer has listed once.
func (h *host) expectLists(t *testing.T, when string) {
	t.Helper()
	if n := h.lists.Load(); n != int64(*hostInformers) {
		t.Errorf("%s: %d informers of %s listed %d times", when, *hostInformers, h.address, n)
	}
}

// endpoints returns the addresses of the kubernetes Service.
func endpoints(t *testing.T, c *kubernetes.Clientset) (addresses []string) {
	slices, err := c.DiscoveryV1().EndpointSlices("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
	if err != nil {
		if !apierrors.IsNotFound(err) {
			t.Error(err)
		}
		return nil
	}
	for _, e := range slices.Endpoints {
		addresses = append(addresses, e.Addresses...)
	}
	return addresses
}

// newWrites returns a function that creates a ConfigMap at each live host, and waits until all their informers have
// every ConfigMap.
func newWrites(t *testing.T) func(live ...*host) {
	var written []string
	return func(live ...*host) {
		t.Helper()
		for i, h := range live {
			name := fmt.Sprintf("cm-%d-%d", len(written), i)
			harness.Write(t, func() error {
				_, err := h.Client().CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{
					ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
				return err
			})
			written = append(written, name)
		}
		harness.Eventually(t, harness.Soon, func() error { // a reflector waits for up to 30 s after failures
			for i, h := range live {
				if m := h.missing(written); m != "" {
					return fmt.Errorf("host %d has not seen %s", i, m)
				}
			}
			return nil
		})
	}
}

// Three hosts serve a control plane on the same etcd beside a kube-apiserver. Each host has an event log of its own. A
// host that is killed or stops disturbs no client of the others, and every client sees every write.
func TestThreeHostsShareEtcd(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	reference := harness.KubeAPIServer(t, dir, harness.Etcd(t, dir), "--advertise-address=192.0.2.9")
	hosts := make([]*host, 3)
	for i := range hosts {
		address := fmt.Sprintf("192.0.2.%d", i+1)
		hosts[i] = &host{Server: reference.Beside("", "--advertise-address="+address), address: address}
		hosts[i].follow(t)
	}
	all := append([]*host{{Server: reference.Server, address: "192.0.2.9"}}, hosts...)
	all[0].follow(t)
	awaitEndpoints := func(want ...*host) {
		t.Helper()
		var addresses []string
		for _, h := range want {
			addresses = append(addresses, h.address)
		}
		slices.Sort(addresses)
		harness.Eventually(t, harness.Soon, func() error {
			for _, h := range want {
				if got := endpoints(t, h.Client()); !slices.Equal(got, addresses) {
					return fmt.Errorf("the endpoints are %q, not %q", got, addresses)
				}
			}
			return nil
		})
	}
	write := newWrites(t)
	awaitEndpoints(all...)
	write(all...)
	leases, err := hosts[0].Client().CoordinationV1().Leases("kube-system").List(t.Context(), metav1.ListOptions{
		LabelSelector: "apiserver.kubernetes.io/identity=kube-apiserver"})
	if err != nil || len(leases.Items) != 1 { // all servers have the name of this machine
		t.Errorf("%d identity leases, %v", len(leases.Items), err)
	}

	refused := make(chan []byte, 1)
	other := exec.CommandContext(t.Context(), harness.Watershed(), "up", "--data-dir", harness.TempDir(t),
		"--etcd-servers="+reference.Etcd, fmt.Sprintf("--secure-port=%d", porttest.FreePort(t))) // with a CA of its own
	go func() {
		out, _ := other.CombinedOutput()
		refused <- out
	}()

	hosts[0].Kill() // the first host runs the controllers
	write(all[0], hosts[1], hosts[2])
	awaitEndpoints(all[0], hosts[1], hosts[2])
	hosts[1].Stop()
	if got := endpoints(t, hosts[2].Client()); slices.Contains(got, hosts[1].address) {
		t.Errorf("the stopped host is an endpoint: %q", got)
	}
	write(all[0], hosts[2])
	contains(t, "the error", string(<-refused), "has another client CA (CN=ca)")
	all[0].expectLists(t, "before kube-apiserver was killed")
	reference.Kill()
	hosts[0].Server = reference.Beside(hosts[0].Dir, "--advertise-address="+hosts[0].address,
		fmt.Sprintf("--secure-port=%d", hosts[0].Port))
	write(hosts[0], hosts[2])
	awaitEndpoints(hosts[0], hosts[2])
	if *hostInformers > 1 {
		killInTurn(t, reference, hosts, write)
	}
	for _, h := range hosts {
		h.expectLists(t, "at the end")
		if out := h.Output(); strings.Contains(out, "panic") {
			t.Errorf("%s: %s", h.address, out)
		}
	}
}

// killInTurn kills each host of Watershed, and starts it again. The host's own informers resume, without a list.
func killInTurn(t *testing.T, reference *harness.Reference, all []*host, write func(...*host)) {
	start := func(h *host) {
		h.Server = reference.Beside(h.Dir, "--advertise-address="+h.address, fmt.Sprintf("--secure-port=%d", h.Port))
	}
	start(all[1]) // it was stopped
	write(all...)
	for i, h := range all {
		h.Kill()
		write(slices.Delete(slices.Clone(all), i, i+1)...)
		start(h)
		write(all...)
		for _, other := range all {
			other.expectLists(t, "after "+h.address+" was killed")
		}
	}
}

// Three hosts with kube-apiserver move to Watershed in turn, and back. `watershed migrate` derives the settings of each
// from its manifest. Every informer sees every write. No informer lists again on the way to Watershed, and on the way
// back only informers of the host that moves.
func TestHostsMigrateInTurn(t *testing.T) {
	t.Parallel()
	first := harness.TempDir(t)
	etcd := harness.Etcd(t, first)
	var all []*host
	var references []*harness.Reference
	for i := range 3 {
		dir := first
		if i > 0 {
			dir = harness.TempDir(t)
			if err := os.CopyFS(filepath.Join(dir, "pki"), os.DirFS(filepath.Join(first, "pki"))); err != nil {
				t.Fatal(err)
			}
		}
		address := fmt.Sprintf("192.0.2.%d", i+1)
		r := harness.KubeAPIServer(t, dir, etcd, "--advertise-address="+address)
		references = append(references, r)
		all = append(all, &host{Server: r.Server, address: address})
		all[i].follow(t)
	}
	write := newWrites(t)
	write(all...)
	for i, r := range references {
		manifest := filepath.Join(r.Dir, "kube-apiserver.yaml")
		if err := os.WriteFile(manifest, []byte(r.Manifest()), 0o600); err != nil {
			t.Fatal(err)
		}
		settings, err := exec.Command(harness.Watershed(), "migrate", "--from", manifest).Output()
		if err != nil {
			t.Fatal(err)
		}
		config := filepath.Join(r.Dir, "watershed.yaml")
		if err := os.WriteFile(config, settings, 0o600); err != nil {
			t.Fatal(err)
		}
		r.StopListening()
		all[i].Server = harness.Up(t, "", "--config="+config, fmt.Sprintf("--secure-port=%d", r.Port))
		all[i].Kubeconfig = r.Kubeconfig
		r.Kill()
		write(all...)
	}
	for _, h := range all {
		h.expectLists(t, "on the way to Watershed")
	}
	for i, r := range references {
		all[i].Stop()
		all[i].Server = r.Server
		r.Restart()
		write(all...)
		for j := i + 1; j < len(all); j++ {
			all[j].expectLists(t, fmt.Sprintf("as host %d moves back", i))
		}
	}
}
