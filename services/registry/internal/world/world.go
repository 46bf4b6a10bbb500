// Package world is what the registry's packages are tested in: everything that is built in, over an etcd of the test's
// own. Who would be asked about a write is a fake at the contract (Gate).
package world

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"

	"watershed.dev/platform/crd"
	"watershed.dev/platform/egress"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/apis"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/loopback"
	"watershed.dev/services/registry/resources"
	"watershed.dev/services/registry/source"
	"watershed.dev/services/registry/storage"
	"watershed.dev/services/registry/tail"
)

// World is a registry without its log and its loops.
type World struct {
	Resources *resources.Resources
	Source    *source.Source
	Tail      *tail.Tail
	// Client calls the registry's own verbs, as its loops do.
	Client *kubernetes.Clientset
}

// etcd starts an etcd that ends with the test, and answers its URL.
func etcd(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ws") // a socket's path may not be long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := func(name string) url.URL {
		return url.URL{Scheme: "unix", Path: filepath.Join(dir, name)}
	}
	nowhere := url.URL{Scheme: "http", Host: "localhost:1"} // no socket may be advertised, and nobody asks
	c := embed.NewConfig()
	c.Dir = filepath.Join(dir, "data")
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{socket("client")}, []url.URL{nowhere}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{socket("peer")}, []url.URL{nowhere}
	c.InitialCluster = c.Name + "=" + nowhere.String()
	c.UnsafeNoFsync = true
	c.MaxRequestBytes = 3 << 19 // half of what Watershed sets: tests of what is too large need not be
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	e, err := embed.StartEtcd(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(20 * time.Second):
		t.Fatal("etcd does not start")
	}
	at := socket("client")
	return at.String()
}

// New builds a world. flags are the registry's, such as "--runtime-config=api/beta=true".
func New(t testing.TB, flags ...string) *World {
	t.Helper()
	o, s := apis.NewOptions(), storage.Options{}
	fs := pflag.NewFlagSet("world", pflag.ContinueOnError)
	o.AddFlags(fs)
	s.AddFlags(fs)
	if err := fs.Parse(append([]string{"--etcd-servers=" + etcd(t)}, flags...)); err != nil {
		t.Fatal(err)
	}
	served, err := o.Resources()
	if err != nil {
		t.Fatal(err)
	}
	store, err := storage.Open(t.Context(), s, egress.Selector{}, served, "world")
	if err != nil {
		t.Fatal(err)
	}
	w := &World{Resources: &resources.Resources{Storage: store}, Tail: tail.New()}
	w.Source = source.New(w.Resources, storage.NewLogKeys(store), nil)
	config := loopback.New(w.Resources, w.Tail).Config()
	if w.Client, err = kubernetes.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	w.Resources.BuiltIn, err = apis.BuiltIn(&o, store, served, apis.Deps{
		Loopback:  config,
		Client:    w.Client,
		Informers: informers.NewSharedInformerFactory(w.Client, 0),
	})
	if err != nil {
		t.Fatal(err)
	}
	w.Resources.Custom = &customresources.Set{
		Storage:    store,
		Converters: crd.NewConverters(nil, nil),
		Changed:    func() {},
	}
	if w.Resources.Custom.Models, err = w.Resources.BuiltIn.Models("apiextensions.k8s.io"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return w
}

// Gate answers what a write asks: everything is allowed and admitted as it is, but for what Reviewed says.
type Gate struct {
	// Reviewed answers an admission review; nil admits.
	Reviewed func(registryv1.Phase, *admissionv1.Review) (*admissionv1.Verdict, error)
	// Namespaces is what the registry knows of them; nil: admission is asked.
	Namespaces admission.MutationInterface
	// Asked are the reviews, in order.
	Asked []string
}

// Lifecycle implements verbs.Gate.
func (g *Gate) Lifecycle() admission.MutationInterface { return g.Namespaces }

// Review implements verbs.Gate.
func (g *Gate) Review(_ context.Context, p registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error) {
	g.Asked = append(g.Asked, strings.TrimPrefix(p.String(), "PHASE_")+" "+
		strings.TrimPrefix(r.Operation.String(), "OPERATION_"))
	if g.Reviewed != nil {
		return g.Reviewed(p, r)
	}
	return &admissionv1.Verdict{}, nil
}

// Authorize implements verbs.Gate.
func (g *Gate) Authorize(context.Context, *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	return &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW}, nil
}

// ReviewToken implements verbs.Gate.
func (g *Gate) ReviewToken(context.Context, *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	return nil, errors.New("nobody reviews tokens here")
}

// Rules implements verbs.Gate.
func (g *Gate) Rules(context.Context, *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	return nil, errors.New("nobody knows rules here")
}

// Operations are all that a gateway may name as of interest to admission.
var Operations = []admissionv1.Operation{
	admissionv1.Operation_OPERATION_CREATE,
	admissionv1.Operation_OPERATION_UPDATE,
	admissionv1.Operation_OPERATION_DELETE,
	admissionv1.Operation_OPERATION_CONNECT,
}

// ConfigMaps are the resource that most tests write.
var ConfigMaps = &commonv1.Resource{Version: "v1", Resource: "configmaps"}

// Write runs one write of a resource in namespace x, as an administrator.
func (w *World) Write(ctx context.Context, of *commonv1.Resource, r *registryv1.WriteRequest,
	gate *Gate) (*registryv1.ObjectResponse, error) {
	e, err := w.Resources.Endpoint(ctx, of)
	if err != nil {
		return nil, err
	}
	r.Resource, r.Admit, r.Validate = of, Operations, Operations
	r.User = &commonv1.User{Name: "admin", Groups: []string{"system:masters"}}
	if e.Entry.Namespaced {
		r.Namespace = "x"
	}
	if r.Output == nil {
		r.Output = &registryv1.Output{MediaType: "application/json"}
	}
	if r.ContentType == "" {
		r.ContentType = "application/json"
	}
	if r.UserAgent == "" {
		r.UserAgent = "test/1"
	}
	return e.Write(resources.Within(ctx, r.Verb, of, r.User, r.Namespace, r.Name), r, gate)
}

// Get reads one object of a resource in namespace x.
func (w *World) Get(ctx context.Context, of *commonv1.Resource,
	r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	e, err := w.Resources.Endpoint(ctx, of)
	if err != nil {
		return nil, err
	}
	w.read(of, r, e.Entry.Namespaced)
	return e.Get(resources.Within(ctx, "get", of, r.User, r.Namespace, r.Name), r)
}

// List lists a resource in namespace x.
func (w *World) List(ctx context.Context, of *commonv1.Resource, r *registryv1.GetRequest) ([]byte, error) {
	e, err := w.Resources.Endpoint(ctx, of)
	if err != nil {
		return nil, err
	}
	w.read(of, r, e.Entry.Namespaced)
	return e.List(resources.Within(ctx, "list", of, r.User, r.Namespace, ""), r)
}

func (w *World) read(of *commonv1.Resource, r *registryv1.GetRequest, namespaced bool) {
	r.Resource, r.User = of, &commonv1.User{Name: "admin", Groups: []string{"system:masters"}}
	if namespaced {
		r.Namespace = "x"
	}
	if r.Output == nil {
		r.Output = &registryv1.Output{MediaType: "application/json"}
	}
}
