// Package e2e tests `up` and `split` with real clients: kubectl, client-go, kubeadm and the controllers. It compares
// many responses with kube-apiserver's.
package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	"k8s.io/kubectl/pkg/cmd/explain"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

func contains(t *testing.T, title, out string, wants ...string) {
	t.Helper()
	for _, w := range wants {
		if !strings.Contains(out, w) {
			t.Errorf("%s: no %q in:\n%s", title, w, out)
		}
	}
}

func TestKubectlSession(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	contains(t, "namespaces", s.Kubectl("get", "ns"), "default", "kube-system", "kube-public", "kube-node-lease")
	contains(t, "create", s.Kubectl("create", "configmap", "a", "--from-literal=k=v"), "created")
	contains(t, "label", s.Kubectl("label", "configmap", "a", "x=y"), "labeled")
	contains(t, "patch", s.Kubectl("patch", "configmap", "a", "--type=json",
		`-p=[{"op":"add","path":"/data/n","value":"1"}]`), "patched")
	contains(t, "get", s.Kubectl("get", "configmap", "a", "-o", "jsonpath={.data.n}{.metadata.labels.x}"), "1y")
	deployment := `{apiVersion: apps/v1, kind: Deployment, metadata: {name: web}, spec: {replicas: %d, ` +
		`selector: {matchLabels: {app: web}}, template: {metadata: {labels: {app: web}}, ` +
		`spec: {containers: [{name: c, image: nginx}]}}}}`
	contains(t, "apply", s.Apply(fmt.Sprintf(deployment, 1)), "created")
	contains(t, "apply again", s.Apply(fmt.Sprintf(deployment, 1)), "unchanged")
	contains(t, "apply changed", s.Apply(fmt.Sprintf(deployment, 2)), "configured")
	contains(t, "scale", s.Kubectl("scale", "deployment", "web", "--replicas=3"), "scaled")
	contains(t, "table", s.Kubectl("get", "deployment", "web"), "READY", "UP-TO-DATE", "0/3")
	contains(t, "server-side", s.Apply(`{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {mine: "1"}}`,
		"--server-side", "--field-manager=one"), "serverside-applied")
	out, err := s.TryKubectl(`{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {mine: "2"}}`, "apply",
		"--server-side", "--field-manager=two", "-f", "-")
	if err == nil {
		t.Errorf("two managers may not both own a field:\n%s", out)
	}
	contains(t, "conflict", out, `conflict with "one": .data.mine`)
	contains(t, "explain", s.Kubectl("explain", "deployment.spec.replicas"), "FIELD: replicas <integer>")
	contains(t, "can-i", s.Kubectl("auth", "can-i", "delete", "nodes"), "yes")
	if out, err := s.TryKubectl("", "auth", "can-i", "delete", "nodes", "--as", "bob"); err == nil {
		t.Errorf("bob may delete nodes: %s", out)
	}
	contains(t, "whoami", s.Kubectl("auth", "whoami"), "kubernetes-admin", "system:masters")
	contains(t, "delete", s.Kubectl("delete", "configmap", "a"), "deleted")
	if out, err := s.TryKubectl("", "get", "configmap", "a"); err == nil {
		t.Errorf("still there: %s", out)
	}
	contains(t, "readyz", s.Kubectl("get", "--raw", "/readyz?verbose"), "[+]etcd ok", "readyz check passed")
	contains(t, "metrics", s.Kubectl("get", "--raw", "/metrics"), "apiserver_request_total")
}

// TestEveryResourceIsKubeAPIServers checks that api-resources prints kube-apiserver's output, and that every listable
// resource can be listed.
func TestEveryResourceIsKubeAPIServers(t *testing.T) {
	t.Parallel()
	s, oracle := harness.Up(t, ""), harness.Oracle(t)
	for _, args := range [][]string{{"api-resources", "-o", "wide", "--sort-by=name"}, {"api-versions"}} {
		want, got := oracle.Kubectl(args...), s.Kubectl(args...)
		if want != got {
			t.Errorf("kubectl %s differs\nkube-apiserver:\n%s\nWatershed:\n%s", args[0], want, got)
		}
	}
	all := strings.Fields(s.Kubectl("api-resources", "--verbs=list", "-o", "name"))
	if out, err := s.TryKubectl("", "get", strings.Join(all, ","), "-A"); err != nil {
		t.Errorf("get: %v\n%s", err, out)
	}
	// In this process, because a kubectl for each resource would read discovery and the OpenAPI documents again.
	config := genericclioptions.NewConfigFlags(true)
	config.KubeConfig, config.CacheDir = &s.Kubeconfig, new(t.TempDir())
	kubectl := cmdutil.NewFactory(config)
	for _, r := range all {
		name, _, _ := strings.Cut(r, ".") // kubectl explain takes dots for fields
		flags := explain.NewExplainFlags(genericiooptions.NewTestIOStreamsDiscard())
		o, err := flags.ToOptions(kubectl, "kubectl", []string{name})
		if err == nil {
			err = o.Run()
		}
		if err != nil {
			t.Errorf("explain %s: %v", r, err)
		}
	}
}

func TestAFreshClusterLooksLikeKubeAPIServers(t *testing.T) {
	t.Parallel()
	s, oracle := harness.Up(t, ""), harness.Oracle(t)
	for _, r := range []string{"namespaces", "priorityclasses", "clusterroles", "clusterrolebindings", "flowschemas",
		"prioritylevelconfigurations", "servicecidrs", "apiservices"} {
		harness.Eventually(t, harness.Soon, func() error {
			want, got := oracle.Kubectl("get", r, "-A", "-o", "name"), s.Kubectl("get", r, "-A", "-o", "name")
			if want != got {
				return fmt.Errorf("%s differ\nkube-apiserver:\n%s\nWatershed:\n%s", r, want, got)
			}
			return nil
		})
	}
	harness.Eventually(t, harness.Soon, func() error {
		out, err := s.TryKubectl("", "get", "service,endpointslices", "-n", "default")
		if err != nil || strings.Count(out, "kubernetes") < 2 {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
}

// TestRacingWritersLoseNothing checks that concurrent read-modify-write loops lose no update.
func TestRacingWritersLoseNothing(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "", "--max-requests-inflight=0", "--max-mutating-requests-inflight=0",
		"--enable-priority-and-fairness=false")
	c := s.Client().CoreV1().ConfigMaps("default")
	ctx := t.Context()
	if _, err := c.Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "race"},
		Data:       map[string]string{},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const writers = 100
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			backoff := wait.Backoff{Duration: 2 * time.Millisecond, Factor: 1, Jitter: 10, Steps: 2000}
			harness.TryWrite(t, func() error { // a repeated write finds its own key
				return retry.OnError(backoff, apierrors.IsConflict, func() error {
					cm, err := c.Get(ctx, "race", metav1.GetOptions{})
					if err != nil {
						return err
					}
					if cm.Data == nil {
						cm.Data = map[string]string{}
					}
					cm.Data[fmt.Sprint(i)] = "x"
					_, err = c.Update(ctx, cm, metav1.UpdateOptions{})
					return err
				})
			})
		})
	}
	wg.Wait()
	cm, err := c.Get(ctx, "race", metav1.GetOptions{})
	if err != nil || len(cm.Data) != writers {
		t.Errorf("%d of %d writes are there (%v)", len(cm.Data), writers, err)
	}
}

// TestInformersAndConsistentLists checks that an informer sees every change, and a consistent list every acknowledged
// write.
func TestInformersAndConsistentLists(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	ctx, cancel := context.WithCancel(t.Context())
	client := s.Client()
	f := informers.NewSharedInformerFactory(client, 0)
	lister, informer := f.Core().V1().ConfigMaps().Lister(), f.Core().V1().ConfigMaps().Informer()
	f.Start(ctx.Done())
	defer f.Shutdown()
	defer cancel()
	if !f.WaitForCacheSync(ctx.Done())[informerType] {
		t.Fatal("the informer does not sync")
	}
	_ = informer
	for i := range 200 {
		harness.Write(t, func() error {
			_, err := client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
				Name:   fmt.Sprint("c", i),
				Labels: map[string]string{"mine": "yes"},
			}}, metav1.CreateOptions{})
			return err
		})
		list, err := client.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{LabelSelector: "mine=yes"})
		if err != nil || len(list.Items) != i+1 {
			t.Fatalf("a list after write %d has %d objects (%v)", i+1, len(list.Items), err)
		}
	}
	harness.Eventually(t, harness.Soon, func() error {
		all, err := lister.ConfigMaps("default").List(everything)
		if err != nil || len(all) < 200 {
			return fmt.Errorf("the informer has %d (%v)", len(all), err)
		}
		return nil
	})
	page, err := client.CoreV1().ConfigMaps("default").List(ctx,
		metav1.ListOptions{LabelSelector: "mine=yes", Limit: 50})
	got := 0
	for ; err == nil; page, err = client.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{
		LabelSelector: "mine=yes",
		Limit:         50,
		Continue:      page.Continue,
	}) {
		got += len(page.Items)
		if page.Continue == "" {
			break
		}
	}
	if err != nil || got != 200 {
		t.Errorf("the pages hold %d objects (%v)", got, err)
	}
}

// TestARevokedPermissionIsGoneAtOnce checks that a revoked permission is gone at once, although decisions are cached.
func TestARevokedPermissionIsGoneAtOnce(t *testing.T) {
	s := harness.Up(t, "")
	t.Run("watch of a Namespace", func(t *testing.T) { aNamespacesWatchEndsWithItsRoleBinding(t, s) })
	bob := impersonator(t, s, "bob")
	grantAndRevoke(t, s, 0, func() bool { return reads(t, bob) })
}

// aNamespacesWatchEndsWithItsRoleBinding revokes a RoleBinding in a namespace that permits the watch of the Namespace.
func aNamespacesWatchEndsWithItsRoleBinding(t *testing.T, s *harness.Server) {
	s.Kubectl("create", "namespace", "watched")
	s.Kubectl("-n", "watched", "create", "role", "watcher", "--verb=watch", "--resource=namespaces")
	s.Kubectl("-n", "watched", "create", "rolebinding", "alice", "--role=watcher", "--user=alice")
	alice := s.Config()
	alice.Impersonate.UserName = "alice"
	client := clientFor(t, alice).CoreV1().RESTClient()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
	defer cancel()
	var watch io.ReadCloser
	harness.Eventually(t, harness.Soon, func() (err error) {
		watch, err = client.Get().AbsPath("/api/v1/watch/namespaces/watched").Stream(ctx)
		return err
	})
	defer watch.Close()
	s.Kubectl("-n", "watched", "delete", "rolebinding", "alice")
	if _, err := io.Copy(io.Discard, watch); err != nil {
		t.Errorf("the watch goes on: %v", err)
	}
}

func TestKillAndRestartLosesNothing(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	s := harness.Up(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	acknowledged := map[string]types.UID{}
	var wg sync.WaitGroup
	client := s.Client()
	for w := range 4 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				cm, err := client.CoreV1().ConfigMaps("default").Create(ctx,
					&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("w%d-%d", w, i)}},
					metav1.CreateOptions{})
				if err == nil {
					mu.Lock()
					acknowledged[cm.Name] = cm.UID
					mu.Unlock()
				}
			}
		})
	}
	harness.Eventually(t, harness.Soon, func() error {
		mu.Lock()
		defer mu.Unlock()
		if len(acknowledged) < 300 {
			return fmt.Errorf("%d writes so far", len(acknowledged))
		}
		return nil
	})
	s.Kill()
	cancel()
	wg.Wait()
	s = harness.Up(t, dir)
	list, err := s.Client().CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]types.UID{}
	for _, cm := range list.Items {
		have[cm.Name] = cm.UID
	}
	for name, uid := range acknowledged {
		if have[name] != uid {
			t.Errorf("the acknowledged %s is lost", name)
		}
	}
}

func TestASecondUpIsRefused(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	for range 3 { // a garbage collection once closed the lock file
		s.Kubectl("get", "--raw", "/debug/pprof/heap?gc=1&debug=1")
	}
	second := func(dir string, port int) *exec.Cmd {
		return exec.Command(harness.Watershed(), "up", "--data-dir", dir, "--secure-port", fmt.Sprint(port))
	}
	refused(t, second(s.Dir, porttest.FreePort(t)), fmt.Sprintf("--data-dir %q is in use by process", s.Dir))
	refused(t, second(harness.TempDir(t), s.Port), fmt.Sprintf("gateway: --bind-address 0.0.0.0 --secure-port %d: ", s.Port))
	split := second(harness.TempDir(t), s.Port)
	split.Args[1] = "split"
	refused(t, split, fmt.Sprintf("gateway: --bind-address 0.0.0.0 --secure-port %d: ", s.Port))
}

// refused runs a command that must fail with exit code 1 and a line on standard error. A command that starts a server
// instead is killed after harness.Soon.
func refused(t *testing.T, cmd *exec.Cmd, want string) {
	t.Helper()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(harness.Soon, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("%q: %v", cmd.Args, err)
	}
	if line, more, _ := strings.Cut(stderr.String(), "\n"); !strings.Contains(line, want) || more != "" {
		t.Errorf("%q: want a line with %s:\n%s", cmd.Args, want, stderr.String())
	}
}

func TestBadSettingsStopTheStartWithOneLine(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"unknown flag": {[]string{"up", "--secure-prot=1"},
			`unknown flag: --secure-prot (did you mean "--secure-port"?)`},
		"bad value": {[]string{"up", "--secure-port=abc"}, "--secure-port=abc: not a port (1–65535)"},
		"bad size": {[]string{"up", "--data-dir=DIR", "--watch-ring-bytes=-3"},
			"--watch-ring-bytes=-3: want 1 or more"},
		"missing gate": {[]string{"up", "--data-dir=DIR", "--feature-gates=AllAlpha=true"},
			"no StorageVersion objects are written; set StorageVersionAPI=false"},
		"missing file": {[]string{"gateway", "--config", "/none.yaml"}, "/none.yaml"},
		"no identity": {[]string{"watchfanout", "--registry-addresses=127.0.0.1:1", "--nats-url=tls://127.0.0.1:1"},
			"--rpc-"},
		"bad replicas":    {[]string{"split", "--replicas=foo=1"}, "--replicas foo=1"},
		"bad network":     {[]string{"split", "--rpc-network=x"}, `--rpc-network "x"`},
		"unknown command": {[]string{"nope"}, `unknown command "nope"`},
		"no directory": {[]string{"up", "--data-dir=DIR", "--log-end-dir=/proc/x"},
			`--log-end-dir "/proc/x": mkdir /proc/x`},
		"bad range": {[]string{"up", "--data-dir=DIR", "--service-cluster-ip-range=x"},
			"--service-cluster-ip-range"},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{}, c.args...)
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "DIR", harness.TempDir(t))
			}
			refused(t, exec.Command(harness.Watershed(), args...), c.want)
		})
	}
}

// TestServiceAddresses checks that a server starts although its range of Service addresses is full, and although the
// range has another family than before.
func TestServiceAddresses(t *testing.T) {
	t.Parallel()
	const full = "--service-cluster-ip-range=10.96.0.0/29"
	s := harness.Up(t, "", full)
	for n := 0; ; n++ {
		out, err := s.TryKubectl("", "create", "service", "clusterip", fmt.Sprint("s", n), "--tcp=80")
		if err == nil && n < 8 {
			continue
		}
		if err == nil || !strings.Contains(out+err.Error(), "range is full") {
			t.Errorf("after %d Services: %s, %v", n, out, err)
		}
		break
	}
	s.Stop()
	harness.Up(t, s.Dir, full).Stop()
	s = harness.Up(t, s.Dir, "--service-cluster-ip-range=fd00::/112")
	if out := s.Kubectl("get", "services", "-o", "name"); !strings.Contains(out, "service/kubernetes\n") {
		t.Errorf("%s", out)
	}
}

// TestUpTakesAClustersPKI checks that `up` takes over a cluster's etcd, port and PKI. The cluster's PKI did not sign
// the certificates of up's authn, authz and admission, and they work all the same.
func TestUpTakesAClustersPKI(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	etcd := harness.Etcd(t, dir)
	reference := harness.KubeAPIServer(t, dir, etcd)
	reference.Kubectl("create", "configmap", "kept", "--from-literal=by=kube-apiserver")
	reference.Kubectl("create", "serviceaccount", "theirs")
	token := strings.TrimSpace(reference.Kubectl("create", "token", "theirs"))
	reference.Stop()
	p := func(f string) string { return filepath.Join(dir, "pki", f) }
	up := harness.Up(t, "", fmt.Sprintf("--secure-port=%d", reference.Port), "--etcd-servers="+etcd,
		"--client-ca-file="+p("ca.crt"),
		"--tls-cert-file="+p("serving.crt"), "--tls-private-key-file="+p("serving.key"),
		"--requestheader-client-ca-file="+p("ca.crt"),
		"--service-account-key-file="+p("sa.pub"), "--service-account-signing-key-file="+p("sa.key"),
		"--service-cluster-ip-range=10.96.0.0/16")
	if out := reference.Kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.by}"); out != "kube-apiserver" {
		t.Errorf("%q", out)
	}
	reference.Kubectl("create", "configmap", "new", "--from-literal=by=watershed")
	reference.Kubectl("create", "serviceaccount", "ours")
	// a token that kube-apiserver issued, and a token of Watershed's
	for _, token := range []string{token, strings.TrimSpace(reference.Kubectl("create", "token", "ours"))} {
		out, err := up.TryKubectl("", "--kubeconfig=/dev/null",
			"--server="+fmt.Sprintf("https://127.0.0.1:%d", up.Port),
			"--insecure-skip-tls-verify", "--token="+token, "auth", "whoami", "-o",
			"jsonpath={.status.userInfo.username}")
		if err != nil || !strings.HasPrefix(out, "system:serviceaccount:default:") {
			t.Errorf("%s, %v", out, err)
		}
	}
	// a certificate of the inner authority authenticates no cluster client
	if out, err := reference.TryKubectl("", "get", "namespaces", "--client-certificate="+filepath.Join(up.Dir, "pki",
		"inner-registry.crt"), "--client-key="+filepath.Join(up.Dir, "pki", "inner-registry.key")); err == nil {
		t.Errorf("a service of the inner network reads the cluster: %s", out)
	}
}

// TestAlwaysAllowStartsWithAnAnonymousSection checks that AlwaysAllow starts with an `anonymous` section in
// --authentication-config, and rejects anonymous clients.
func TestAlwaysAllowStartsWithAnAnonymousSection(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "authentication.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: apiserver.config.k8s.io/v1\n"+
		"kind: AuthenticationConfiguration\nanonymous: {enabled: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := harness.Up(t, "", "--authorization-mode=AlwaysAllow", "--authentication-config="+file)
	_, err := as(t, s, func(*rest.Config) {}).CoreV1().Secrets("kube-system").List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsUnauthorized(err) {
		t.Error(err)
	}
}

// TestAlwaysAllowRejectsAnonymousClients checks that AlwaysAllow rejects anonymous clients even with
// --anonymous-auth=true, as kube-apiserver does. Other users may impersonate and review the anonymous user.
func TestAlwaysAllowRejectsAnonymousClients(t *testing.T) {
	t.Parallel()
	flags := []string{"--authorization-mode=AlwaysAllow", "--anonymous-auth=true"}
	for name, s := range map[string]*harness.Server{
		"watershed":      harness.Up(t, "", flags...),
		"kube-apiserver": harness.Oracle(t, flags...),
	} {
		_, err := as(t, s, func(*rest.Config) {}).CoreV1().Secrets("kube-system").List(t.Context(),
			metav1.ListOptions{})
		if !apierrors.IsUnauthorized(err) {
			t.Errorf("%s: %v", name, err)
		}
		if out, err := s.TryKubectl("", "auth", "can-i", "get", "secrets", "--as=system:anonymous",
			"--as-group=system:unauthenticated"); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
		review, err := s.Client().AuthorizationV1().SubjectAccessReviews().Create(t.Context(),
			&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "system:anonymous",
				ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Resource: "secrets"}}},
			metav1.CreateOptions{})
		if err != nil || !review.Status.Allowed {
			t.Errorf("%s: %v: %v", name, err, review)
		}
	}
}
