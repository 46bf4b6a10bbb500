package gateway

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/server/healthz"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// fakeSource is a registry with an error of etcd and an encryption error.
type fakeSource struct {
	registryv1.SourceClient
	calls      int
	etcd       error
	encryption string
}

func (s *fakeSource) Revision(context.Context, *registryv1.RevisionRequest,
	...grpc.CallOption) (*registryv1.RevisionResponse, error) {
	s.calls++
	if s.etcd != nil {
		return nil, s.etcd
	}
	return &registryv1.RevisionResponse{Revision: 1, EncryptionError: s.encryption}, nil
}

// The checks of etcd and of the KMS share a call to registry, and each reports only its own error.
func TestEtcdAndKMSChecksAreSeparate(t *testing.T) {
	away := errors.New("etcd is away")
	for name, c := range map[string]struct {
		source fakeSource
		kms    string
	}{
		"both are well":    {fakeSource{}, ""},
		"the KMS is away":  {fakeSource{encryption: "the KMS is away"}, "the KMS is away"},
		"etcd is away":     {fakeSource{etcd: away}, ""},
		"nothing is known": {fakeSource{etcd: away, encryption: "the KMS is away"}, ""},
	} {
		g := &Service{config: &Config{}, deps: Deps{Source: &c.source}}
		checks := g.checks()
		for range 2 {
			kms, etcd := checks[checkKMS].get(t.Context()), checks[checkEtcd].get(t.Context())
			encryptionErr := ""
			if kms != nil {
				encryptionErr = kms.Error()
			}
			if !errors.Is(etcd, c.source.etcd) || encryptionErr != c.kms {
				t.Errorf("%s: etcd: %v, KMS: %v", name, etcd, kms)
			}
		}
		if c.source.calls != 1 {
			t.Errorf("%s: registry is called %d times", name, c.source.calls)
		}
	}
}

// A gateway that no longer reaches etcd is not ready, so that its Service sends new clients to other gateways. It is
// ready again with the first response.
func TestAGatewayWithoutEtcdIsNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var away atomic.Bool
		g := &Service{health: map[checkName]*check{}, joinable: make(chan struct{}), started: make(chan struct{})}
		for _, name := range startChecks() {
			g.health[name] = &check{probe: func(context.Context) error {
				if name == checkEtcd && away.Load() {
					return errors.New("etcd is away")
				}
				return nil
			}}
		}
		ctx, cancel := context.WithCancel(t.Context())
		go g.awaitStart(ctx)
		for _, isAway := range []bool{false, true, false} {
			away.Store(isAway)
			time.Sleep(2*checkTTL + time.Millisecond)
			synctest.Wait()
			if err := g.Ready().Err(); (err != nil) != isAway {
				t.Errorf("etcd is away: %v, readiness: %v", isAway, err)
			}
		}
		away.Store(true)
		cancel()
		synctest.Wait()
		if err := g.Ready().Err(); err != nil {
			t.Errorf("the end of the gateway is a reason: %v", err)
		}
	})
}

// startHookChecks are the checks of start hooks in kube-apiserver 1.36 with its default flags. test/differential
// compares them with kube-apiserver's index.
var startHookChecks = []string{
	"autoregister-completion",
	"poststarthook/aggregator-reload-proxy-client-cert", // with --proxy-client-cert-file
	"poststarthook/apiservice-discovery-controller",
	"poststarthook/apiservice-openapi-controller",
	"poststarthook/apiservice-openapiv3-controller",
	"poststarthook/apiservice-registration-controller",
	"poststarthook/apiservice-status-local-available-controller",
	"poststarthook/apiservice-status-remote-available-controller",
	"poststarthook/bootstrap-controller",
	"poststarthook/crd-informer-synced",
	"poststarthook/generic-apiserver-start-informers",
	"poststarthook/kube-apiserver-autoregistration",
	"poststarthook/max-in-flight-filter", // with --enable-priority-and-fairness=false
	"poststarthook/peer-endpoint-reconciler-controller",
	"poststarthook/priority-and-fairness-config-consumer",
	"poststarthook/priority-and-fairness-config-producer",
	"poststarthook/priority-and-fairness-filter",
	"poststarthook/rbac/bootstrap-roles",
	"poststarthook/scheduling/bootstrap-system-priority-classes",
	"poststarthook/start-apiextensions-controllers",
	"poststarthook/start-apiextensions-informers",
	"poststarthook/start-apiserver-admission-initializer",
	"poststarthook/start-cluster-authentication-info-controller",
	"poststarthook/start-kube-aggregator-informers",
	"poststarthook/start-kube-apiserver-coordinated-leader-election-controller", // with its gate
	"poststarthook/start-kube-apiserver-identity-lease-controller",
	"poststarthook/start-kube-apiserver-identity-lease-garbage-collector",
	"poststarthook/start-kubernetes-service-cidr-controller",
	"poststarthook/start-legacy-token-tracking-controller",
	"poststarthook/start-service-ip-repair-controllers",
	"poststarthook/start-system-namespaces-controller",
	"poststarthook/storage-object-count-tracker-hook",
	"poststarthook/storage-readiness",
}

// A start hook that registry's flags add is in the order of the names, as in kube-apiserver, and never twice.
func TestWithHooks(t *testing.T) {
	var checks []healthz.HealthChecker
	for _, name := range []string{"ping", "poststarthook/a", "poststarthook/c", "etcd-readiness"} {
		checks = append(checks, healthz.NamedCheck(name, func(*http.Request) error { return nil }))
	}
	var names []string
	for _, c := range withHooks(checks, []string{"b", "c", "b"}) {
		names = append(names, c.Name())
	}
	want := []string{"ping", "poststarthook/a", "poststarthook/b", "poststarthook/c", "etcd-readiness"}
	if !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
}

// The checks of start hooks have kube-apiserver's names, and a row in the documentation.
func TestStartHooksHaveKubeAPIServersNames(t *testing.T) {
	var names []string
	for name := range startHooks {
		names = append(names, name)
	}
	for _, name := range registryHooks {
		if name != autoregistered {
			name = "poststarthook/" + name
		}
		names = append(names, name)
	}
	slices.Sort(names)
	if !slices.Equal(names, startHookChecks) {
		t.Errorf("%q", names)
	}
	page, err := os.ReadFile("../../docs/operators/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if !strings.Contains(string(page), "`"+name+"`") {
			t.Errorf("troubleshooting.md does not have %s", name)
		}
	}
}

// With --livez-grace-period a check fails only after the period.
func TestChecksSucceedDuringTheGracePeriod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failing := healthz.NamedCheck("c", func(*http.Request) error { return errNoView })
		c := afterGracePeriod([]healthz.HealthChecker{failing}, time.Minute)[0]
		for _, want := range []error{nil, errNoView} {
			if err := c.Check(nil); c.Name() != "c" || !errors.Is(err, want) {
				t.Errorf("%s: %v, not %v", c.Name(), err, want)
			}
			time.Sleep(time.Minute)
		}
	})
}

// failedChecks returns the failed checks of a page.
func (g *Service) failedChecks(page string) (failed []string) {
	_, body, _ := g.doRequest("GET", page+"?verbose", "t")
	for _, m := range regexp.MustCompile(`(?m)^\[-\](\S+) failed`).FindAllStringSubmatch(body, -1) {
		failed = append(failed, m[1])
	}
	return failed
}

// The check of a start hook fails while its own part of the system is not there, and the others succeed. The gateway is
// not ready before that part is there.
func TestAStartHookChecksItsOwnPart(t *testing.T) {
	pending := func(names ...string) func() *registryv1.StartHooksResponse {
		return func() *registryv1.StartHooksResponse {
			return &registryv1.StartHooksResponse{Known: true, Pending: names}
		}
	}
	informers := []string{
		"poststarthook/apiservice-registration-controller",
		"poststarthook/crd-informer-synced",
		"poststarthook/generic-apiserver-start-informers",
		"poststarthook/start-apiextensions-informers",
		"poststarthook/start-kube-aggregator-informers",
	}
	openapi := []string{"poststarthook/apiservice-openapi-controller", "poststarthook/apiservice-openapiv3-controller"}
	hanging, err := net.Listen("tcp", "127.0.0.1:0") // it accepts no connection
	if err != nil {
		t.Fatal(err)
	}
	defer hanging.Close()
	for about, c := range map[string]struct {
		o    *fakeServices
		want []string
	}{
		"no view": {
			&fakeServices{view: func(*registryv1.DiscoveryResponse) *registryv1.DiscoveryResponse { return nil }},
			slices.Concat([]string{"poststarthook/apiservice-discovery-controller"}, informers, openapi),
		},
		"no OpenAPI": {&fakeServices{view: func(v *registryv1.DiscoveryResponse) *registryv1.DiscoveryResponse {
			v.Openapi = nil
			return v
		}}, openapi},
		"an aggregated server that hangs": {
			&fakeServices{view: func(v *registryv1.DiscoveryResponse) *registryv1.DiscoveryResponse {
				v.ApiServices = []*registryv1.APIService{{Group: "g", Version: "v1", Available: true,
					ServiceName: "s", ServiceNamespace: "n", Addresses: []string{hanging.Addr().String()}}}
				return v
			}}, []string{"poststarthook/apiservice-discovery-controller"},
		},
		"etcd is away":      {&fakeServices{}, []string{"poststarthook/storage-readiness"}},
		"admission is away": {&fakeServices{}, []string{"poststarthook/start-apiserver-admission-initializer"}},
		"no bootstrap roles": {&fakeServices{startHooks: pending("rbac/bootstrap-roles")},
			[]string{"poststarthook/rbac/bootstrap-roles"}},
		"no APIServices and no controllers of CRDs": {
			&fakeServices{startHooks: pending("autoregister-completion", "start-apiextensions-controllers")},
			[]string{"autoregister-completion", "poststarthook/start-apiextensions-controllers"},
		},
	} {
		if name, ok := strings.CutSuffix(about, " is away"); ok {
			c.o.unavailable.Store(name)
		}
		want := slices.Sorted(slices.Values(c.want))
		isNoHook := func(name string) bool {
			return !strings.HasPrefix(name, "poststarthook/") && name != autoregistered
		}
		var g *Service
		var failed []string
		for try := 0; try < 3 && !slices.Equal(failed, want); try++ { // a fetch may fail before the other hooks succeed
			g = newTestGateway(t, c.o)
			for until := time.Now().Add(2 * time.Minute); !slices.Equal(failed, want) && time.Now().Before(until); {
				time.Sleep(10 * time.Millisecond)
				failed = slices.DeleteFunc(g.failedChecks("/livez"), isNoHook)
				slices.Sort(failed)
			}
		}
		if !slices.Equal(failed, want) {
			t.Fatalf("%s: %q fail, not %q", about, failed, want)
		}
		if g.Ready().Err() == nil {
			t.Errorf("%s: the gateway is ready", about)
		}
	}
}

// The gateway waits for the progress of an elected registry. Hooks that have completed stay completed.
func TestStartHooksStayCompleted(t *testing.T) {
	var response atomic.Pointer[registryv1.StartHooksResponse]
	response.Store(&registryv1.StartHooksResponse{})
	g := newTestGateway(t, &fakeServices{startHooks: response.Load})
	const roles = "/readyz/poststarthook/rbac/bootstrap-roles"
	if code, body, _ := g.doRequest("GET", roles, "t"); code != 500 {
		t.Errorf("without an elected registry: %d %s", code, body)
	}
	response.Store(&registryv1.StartHooksResponse{Known: true})
	g.awaitReady(t)
	response.Store(&registryv1.StartHooksResponse{Known: true, Pending: []string{"rbac/bootstrap-roles"}})
	if code, body, _ := g.doRequest("GET", roles, "t"); code != 200 {
		t.Errorf("with another elected registry: %d %s", code, body)
	}
}

// The check of flow control says that registry does not serve its API. Without this API, a gateway
// never becomes ready.
func TestFairnessReportsThatItsAPIIsNotServed(t *testing.T) {
	g := newTestGateway(t, &fakeServices{}, "--enable-priority-and-fairness")
	for deadline := time.Now().Add(2 * time.Minute); g.discovery.View() == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("registry sends no resources")
		}
	}
	err := g.health["fairness"].probe(t.Context())
	if err == nil || !strings.Contains(err.Error(), "--runtime-config=flowcontrol.apiserver.k8s.io/v1=true") {
		t.Error(err)
	}
}

// A gateway takes a part of a shared port before authn, authz and admission have read their policies, because they read
// them through a gateway. It does not wait for ever for flow control, which writes through admission. It waits for its
// own checks.
func TestAGatewayJoinsASharedPort(t *testing.T) {
	for _, away := range readThroughGateways {
		o := &fakeServices{}
		o.unavailable.Store(string(away))
		g := newTestGateway(t, o, "--enable-priority-and-fairness") // no test runs flow control: it does not become ready
		select {
		case <-g.joinable:
		case <-time.After(2 * time.Minute):
			t.Errorf("it waits for the policies of %s, or for flow control", away)
		}
		if g.Ready().Err() == nil {
			t.Errorf("it is ready without %s", away)
		}
	}
	o := &fakeServices{}
	o.unavailable.Store("etcd")
	g := newTestGateway(t, o)
	for until := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		err := g.Ready().Err() // the first of the reasons by name
		if err != nil && strings.HasPrefix(err.Error(), "etcd: ") {
			break
		}
		if time.Now().After(until) {
			t.Fatal(err)
		}
	}
	select {
	case <-g.joinable:
		t.Error("it joins without etcd")
	case <-time.After(5 * probeInterval):
	}
}
