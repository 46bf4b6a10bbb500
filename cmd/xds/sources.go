package xds

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/version"
)

// fileSource reads replicas from a file.
type fileSource struct {
	path   string
	server *server
	last   os.FileInfo
}

// FilePeriod is the interval between checks of the replicas file.
const FilePeriod = 200 * time.Millisecond

// read publishes the replicas of the file, if the file has changed.
func (f *fileSource) read() error {
	info, err := os.Stat(f.path)
	if err != nil {
		return fmt.Errorf("--replicas-file: %w", err)
	}
	if f.last != nil && os.SameFile(info, f.last) && info.ModTime().Equal(f.last.ModTime()) {
		return nil
	}
	data, err := os.ReadFile(f.path)
	if err != nil {
		return fmt.Errorf("--replicas-file: %w", err)
	}
	var all map[string][]string
	if err := yaml.UnmarshalStrict(data, &all); err != nil {
		return fmt.Errorf("--replicas-file %q: %w", f.path, err)
	}
	parsed := map[string][]Replica{}
	for service, addresses := range all {
		for _, a := range addresses {
			parsed[service] = append(parsed[service], Replica{Address: a})
		}
		if err := checkAll(parsed[service]); err != nil {
			return fmt.Errorf("--replicas-file %q: %s: %w", f.path, service, err)
		}
	}
	for service, replicas := range parsed {
		f.server.set(service, replicas)
	}
	f.last = info
	return nil
}

// watch reads the file after each change. An invalid file changes no replicas.
func (f *fileSource) watch(ctx context.Context) error {
	lastError := ""
	return runEvery(ctx, FilePeriod, func() {
		err := f.read()
		if err != nil && err.Error() != lastError {
			slog.Error("Replicas are unchanged", "error", err)
		}
		lastError = fmt.Sprint(err)
	})
}

// dnsSource resolves replicas by DNS.
type dnsSource struct {
	service, address string
	period           time.Duration
	server           *server
}

// watch publishes every address of the name. A failed lookup changes no replicas.
func (n *dnsSource) watch(ctx context.Context) error {
	address, err := rpc.ParseAddress(n.address)
	if err != nil { // Config.validate has checked it
		return err
	}
	lastError := ""
	return runEvery(ctx, n.period, func() {
		lookup, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		addresses, err := net.DefaultResolver.LookupHost(lookup, address.Host)
		if err != nil {
			if err.Error() != lastError && ctx.Err() == nil {
				slog.Warn("Replicas are unchanged", "peer", n.service, "error", err)
			}
			lastError = err.Error()
			return
		}
		lastError = ""
		var replicas []Replica
		for _, a := range addresses {
			replicas = append(replicas, Replica{Address: rpc.Address{Host: a, Port: address.Port}.String()})
		}
		n.server.set(n.service, replicas)
	})
}

func runEvery(ctx context.Context, period time.Duration, do func()) error {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		do()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// sliceSource watches the EndpointSlices of Services.
type sliceSource struct {
	services map[string]string
	server   *server
	factory  informers.SharedInformerFactory
	lister   listers.EndpointSliceNamespaceLister
	synced   cache.InformerSynced
	changed  chan struct{}
	contact  contact
}

func newSliceSource(c *Config, s *server) (*sliceSource, error) {
	conf, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %q: %w", c.Kubeconfig, err)
	}
	conf.UserAgent = "watershed-xds/" + version.Release()
	e := &sliceSource{services: c.Slices, server: s, changed: make(chan struct{}, 1)}
	conf.Wrap(func(rt http.RoundTripper) http.RoundTripper {
		e.contact.RoundTripper = rt
		return &e.contact
	})
	client, err := kubernetes.NewForConfig(conf)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %q: %w", c.Kubeconfig, err)
	}
	e.factory = informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(c.SlicesNamespace))
	informer := e.factory.Discovery().V1().EndpointSlices()
	e.lister, e.synced = informer.Lister().EndpointSlices(c.SlicesNamespace), informer.Informer().HasSynced
	notify := func(any) {
		select {
		case e.changed <- struct{}{}:
		default:
		}
	}
	_, err = informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    notify,
		UpdateFunc: func(_, o any) { notify(o) },
		DeleteFunc: notify,
	})
	for name := range c.Slices {
		s.waitFor(name)
	}
	return e, err
}

// watch publishes the replicas in EndpointSlices, once the informer has synced. A partial list must not remove
// replicas.
func (e *sliceSource) watch(ctx context.Context) error {
	e.factory.Start(ctx.Done())
	defer e.factory.Shutdown()
	if !cache.WaitForCacheSync(ctx.Done(), e.synced) {
		return ctx.Err()
	}
	for {
		for service, target := range e.services {
			name, port, _ := strings.Cut(target, ":")
			replicas, err := e.replicas(name, port)
			if err != nil {
				slog.Error("Replicas are unchanged", "peer", service, "error", err)
				continue
			}
			e.server.set(service, replicas)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-e.changed:
		}
	}
}

// replicas returns the endpoints of a Service that are ready and not terminating. Clients also check the health of each
// replica.
func (e *sliceSource) replicas(service, port string) ([]Replica, error) {
	all, err := e.lister.List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: service}))
	if err != nil {
		return nil, err
	}
	var out []Replica
	for _, slice := range all {
		number, ok := portOf(slice, port)
		if !ok {
			continue
		}
		for _, endpoint := range slice.Endpoints {
			if !boolOr(endpoint.Conditions.Ready, true) || boolOr(endpoint.Conditions.Terminating, false) {
				continue
			}
			for _, a := range endpoint.Addresses {
				r := Replica{Address: net.JoinHostPort(a, strconv.Itoa(int(number)))}
				if endpoint.Zone != nil {
					r.Zone = *endpoint.Zone
				}
				out = append(out, r)
			}
		}
	}
	return out, checkAll(out)
}

func boolOr(b *bool, unset bool) bool {
	if b == nil {
		return unset
	}
	return *b
}

// portOf returns the number of a slice's port, by the port's name or number.
func portOf(slice *discoveryv1.EndpointSlice, port string) (int32, bool) {
	for _, p := range slice.Ports {
		if p.Port == nil {
			continue
		}
		if p.Name != nil && *p.Name == port || strconv.Itoa(int(*p.Port)) == port {
			return *p.Port, true
		}
	}
	return 0, false
}
