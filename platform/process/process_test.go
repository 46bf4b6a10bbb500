package process

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/porttest"
	"watershed.dev/platform/rpc"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// testService is a service that serves a contract and makes a call when it is built.
type testService struct {
	name      string
	dependsOn []string
	register  func(grpc.ServiceRegistrar)
	build     func(*Deps) error
	api       http.Handler
	policies  *lifecycle.Readiness
}

func (s *testService) module() *Module {
	return &Module{Name: s.name, DependsOn: s.dependsOn, ServesAPI: s.api != nil, Options: func() Options {
		return Options{
			AddFlags: func(*pflag.FlagSet) {},
			Validate: func() error { return nil },
			Build: func(_ context.Context, d *Deps) (*Service, error) {
				if s.build != nil {
					if err := s.build(d); err != nil {
						return nil, err
					}
				}
				return &Service{
					Register: func(r grpc.ServiceRegistrar) {
						if s.register != nil {
							s.register(r)
						}
					},
					Ready:    &lifecycle.Readiness{},
					Run:      func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
					Policies: s.policies,
					API:      s.api,
				}, nil
			},
		}
	}}
}

type authnServer struct {
	authnv1.UnimplementedAuthnServer
}

func (authnServer) Authenticate(context.Context, *authnv1.AuthenticateRequest) (*authnv1.AuthenticateResponse, error) {
	return &authnv1.AuthenticateResponse{}, nil
}

type sourceServer struct {
	registryv1.UnimplementedSourceServer
}

func (sourceServer) Revision(context.Context, *registryv1.RevisionRequest) (*registryv1.RevisionResponse, error) {
	return &registryv1.RevisionResponse{Revision: 7}, nil
}

type watchServer struct {
	watchfanoutv1.UnimplementedWatchServer
}

// start runs a process until the test ends, and waits until it is ready.
func start(t *testing.T, p *Process) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	runners, err := p.Runners(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- lifecycle.Run(ctx, runners, lifecycle.Observer{Started: func() { close(ready) }}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		p.network.close()
	})
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
}

// freeAddress returns an address that no process listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", porttest.FreePort(t))
}

// identities returns the pattern of the services' certificates, and their CA.
func identities(t *testing.T, names ...string) []string {
	dir := t.TempDir()
	ca, err := pki.OpenCA(dir, "ca", "inner")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		leaf := pki.Leaf{Name: name, CommonName: name, SANs: []string{name}, Usage: pki.Client | pki.Server}
		if _, _, _, err := ca.Leaf(leaf); err != nil {
			t.Fatal(err)
		}
	}
	return []string{
		"--rpc-cert-file=" + filepath.Join(dir, "{service}.crt"),
		"--rpc-key-file=" + filepath.Join(dir, "{service}.key"),
		"--rpc-ca-file=" + ca.CertFile(),
	}
}

// A service calls the services of its process and of other processes in the same way. A process shows the certificate
// of the service that a client names, and serves only the contracts that services outside of it may call.
func TestServicesInOneProcessAndInSeveral(t *testing.T) {
	certs := identities(t, "gateway", "authn", "registry", "watchfanout")
	front, tier := freeAddress(t), freeAddress(t)
	var calls atomic.Int64
	all := Modules{
		(&testService{name: "registry", register: func(r grpc.ServiceRegistrar) {
			registryv1.RegisterSourceServer(r, sourceServer{})
			registryv1.RegisterObjectsServer(r, &registryv1.UnimplementedObjectsServer{})
		}}).module(),
		(&testService{name: "authn", register: func(r grpc.ServiceRegistrar) {
			authnv1.RegisterAuthnServer(r, authnServer{})
		}}).module(),
		(&testService{name: "watchfanout", dependsOn: []string{"registry"}, register: func(r grpc.ServiceRegistrar) {
			watchfanoutv1.RegisterWatchServer(r, watchServer{})
		}, build: func(d *Deps) error {
			conn, err := d.Dial("registry")
			if err != nil {
				return err
			}
			resp, err := registryv1.NewSourceClient(conn).Revision(t.Context(), &registryv1.RevisionRequest{})
			if resp.GetRevision() == 7 {
				calls.Add(1)
			}
			_, outside := registryv1.NewObjectsClient(conn).Get(t.Context(), &registryv1.GetRequest{})
			if status.Code(outside) != codes.Unimplemented && status.Code(outside) != codes.PermissionDenied {
				return fmt.Errorf("Objects.Get: %w", outside)
			}
			return err
		}}).module(),
		(&testService{name: "gateway", dependsOn: []string{"authn", "registry", "watchfanout"},
			api: http.NotFoundHandler(), build: func(d *Deps) error {
				conn, err := d.Dial("authn")
				if err != nil {
					return err
				}
				_, err = authnv1.NewAuthnClient(conn).Authenticate(t.Context(), &authnv1.AuthenticateRequest{})
				calls.Add(1)
				return err
			}}).module(),
	}
	load := func(targets string, args ...string) *Process {
		p, err := Load(all, strings.Split(targets, ","), targets, append(args, certs...))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	start(t, load("gateway,authn,registry", "--rpc-address="+front, "--watchfanout-addresses="+tier))
	start(t, load("watchfanout", "--rpc-address="+tier, "--registry-addresses="+front))
	if calls.Load() != 2 {
		t.Errorf("%d of 2 calls arrive", calls.Load())
	}
	id := rpc.TLS{
		CertFile: strings.TrimPrefix(certs[0], "--rpc-cert-file="),
		KeyFile:  strings.TrimPrefix(certs[1], "--rpc-key-file="),
		CAFile:   strings.TrimPrefix(certs[2], "--rpc-ca-file="),
	}
	for service, want := range map[string]codes.Code{"registry": codes.Unimplemented, "authn": codes.Unavailable} {
		conn, err := rpc.Dial(id.Of("gateway"), service, rpc.Addresses{front})
		if err != nil {
			t.Fatal(err)
		}
		timeout := 2 * time.Minute
		if want == codes.Unavailable { // the call waits for a connection
			timeout = 300 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		_, err = authnv1.NewAuthnClient(conn).Authenticate(ctx, &authnv1.AuthenticateRequest{})
		if got := status.Code(err); got != want && !(want == codes.Unavailable && got == codes.DeadlineExceeded) {
			t.Errorf("authn through the connection of %s: %v", service, err)
		}
		cancel()
		conn.Close()
	}
}

// A request to the API of a gateway in the same process waits until the gateway is built.
func TestClientsOfTheAPIInAProcess(t *testing.T) {
	result := make(chan string, 1)
	all := Modules{
		(&testService{name: "authz", build: func(d *Deps) error {
			go func() { // before the gateway is built
				w := httptest.NewRecorder()
				d.API.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/api", nil))
				result <- w.Header().Get("Path")
			}()
			return nil
		}}).module(),
		(&testService{name: "gateway", dependsOn: []string{"authz"}, api: http.HandlerFunc(
			func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Path", r.URL.Path)
			})}).module(),
	}
	p, err := Load(all, []string{"gateway", "authz"}, "run", nil)
	if err != nil {
		t.Fatal(err)
	}
	start(t, p)
	if got := <-result; got != "/api" {
		t.Error(got)
	}
}

// The pages of a process report the state of all its services.
func TestPagesOfASet(t *testing.T) {
	a, b := &Instance{Name: "a"}, &Instance{Name: "b"}
	get := func(path string) string {
		w := httptest.NewRecorder()
		Pages(a, b)[path].ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return strings.TrimSpace(w.Body.String())
	}
	policies := &lifecycle.Readiness{}
	policies.Set("policies", errors.New("not read yet"))
	draining := false
	a.Set(&Service{Ready: &lifecycle.Readiness{}, Draining: func() bool { return draining }})
	if got := get("/readyz"); got != "b is starting; see its log" {
		t.Error(got)
	}
	b.Set(&Service{
		Ready:    &lifecycle.Readiness{},
		Policies: policies,
		Check:    func(context.Context) error { return errors.New("etcd does not respond") },
		Status:   http.RedirectHandler("/x", http.StatusFound),
	})
	if got := get("/readyz"); got != "policies: not read yet" {
		t.Error(got)
	}
	policies.Set("policies", nil)
	if got := get("/readyz"); got != "ok" {
		t.Error(got)
	}
	if got := get("/healthz"); got != "etcd does not respond" {
		t.Error(got)
	}
	if draining = true; get("/readyz") != "it is shutting down" {
		t.Error(get("/readyz"))
	}
	if got := get("/"); !strings.Contains(got, "/x") {
		t.Error(got)
	}
}
