// Package server runs the command kube-apiserver of Watershed. It replaces the kube-apiserver that kubernetes'
// test/integration starts in process. Command integration replaces the files of upstream that start a server with
// copies that call Start.
package server

import (
	"bytes"
	"context"
	"encoding/csv"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/trace/noop"

	extensionsoptions "k8s.io/apiextensions-apiserver/pkg/cmd/server/options"
	"k8s.io/apimachinery/pkg/runtime"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/tracing"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

// The environment variables of the test processes.
const (
	// Binary names the variable with the path of the binary under test.
	Binary = "INTEGRATION_WATERSHED"
	// Logs names the variable with the directory for the logs of failed tests' servers. It may be empty.
	Logs = "INTEGRATION_LOGS"
)

// T is the part of testing.TB that a server uses. Upstream's tests pass several types.
type T interface {
	Helper()
	Logf(format string, args ...any)
	Name() string
	Failed() bool
	Skipf(format string, args ...any)
}

// Server is a running `watershed up`.
type Server struct {
	// Client is the config of a client in the group system:masters, as the loopback client of kube-apiserver is.
	Client *rest.Config
	// Ended receives an error if the process ends before its context, and is closed when the process has ended.
	Ended chan error
}

// token is the bearer token of Client.
const token = "integration-loopback"

// Start starts a server with the flags that correspond to s, on the port of s's listener. s is completed: it names the
// serving certificate. dir is a directory that the caller removes after the server ended. The server ends with ctx.
func Start(ctx context.Context, t T, dir string, s *options.ServerRunOptions) (*Server, error) {
	t.Helper()
	if err := shareClientCAs(dir, s); err != nil {
		return nil, err
	}
	server, err := start(ctx, t, dir, s.Authentication.TokenFile.TokenFile, s.SecureServing, flags(s))
	if err != nil {
		return nil, err
	}
	server.Client.ContentType = runtime.ContentTypeProtobuf // as the loopback client has it
	server.Client.Wrap(tracing.WrapperFor(noop.NewTracerProvider()))
	return server, nil
}

// clientCAs are the client CAs of the servers so far, by the prefix of their keys in etcd.
var (
	clientCAsMu sync.Mutex
	clientCAs   = map[string][]byte{}
)

// shareClientCAs adds the client CAs of the earlier servers of the same prefix to the server's file. Each server of a
// test has a CA of its own. Watershed refuses a server whose file lacks the CA of a live server.
func shareClientCAs(dir string, s *options.ServerRunOptions) error {
	file := &s.Authentication.ClientCert.ClientCA
	if *file == "" {
		return nil
	}
	own, err := os.ReadFile(*file)
	if err != nil {
		return err
	}
	clientCAsMu.Lock()
	defer clientCAsMu.Unlock()
	prefix := s.Etcd.StorageConfig.Prefix
	if !bytes.Contains(clientCAs[prefix], own) {
		clientCAs[prefix] = append(slices.Clone(own), clientCAs[prefix]...)
	}
	if len(clientCAs[prefix]) == len(own) {
		return nil
	}
	*file = filepath.Join(dir, "client-cas.crt")
	return os.WriteFile(*file, clientCAs[prefix], 0o600)
}

// StartExtensions is Start for the flags of an apiextensions-apiserver, which has no users and allows each request.
func StartExtensions(ctx context.Context, t any, dir string,
	s *extensionsoptions.CustomResourceDefinitionsServerOptions) (*Server, error) {
	all, defaults := pflag.NewFlagSet("", pflag.PanicOnError), pflag.NewFlagSet("", pflag.PanicOnError)
	s.AddFlags(all)
	extensionsoptions.NewCustomResourceDefinitionsServerOptions(nil, nil).AddFlags(defaults)
	var args []string
	all.VisitAll(func(f *pflag.Flag) {
		delegated := f.Name == "kubeconfig" || strings.HasPrefix(f.Name, "authentication-") ||
			strings.HasPrefix(f.Name, "authorization-")
		if f.Value.String() != defaults.Lookup(f.Name).DefValue && !slices.Contains(dropped, f.Name) && !delegated {
			args = append(args, arguments(f)...)
		}
	})
	secure := s.RecommendedOptions.SecureServing
	files := secure.ServerCert.CertKey
	args = append(args, "--authorization-mode=AlwaysAllow", "--endpoint-reconciler-type=none",
		"--tls-cert-file="+files.CertFile, "--tls-private-key-file="+files.KeyFile,
		// kube-apiserver requires them, and an apiextensions-apiserver has no service accounts.
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+files.KeyFile,
		"--service-account-signing-key-file="+files.KeyFile)
	return start(ctx, t.(T), dir, "", secure, args)
}

func start(ctx context.Context, t T, dir, tokens string, secure *genericoptions.SecureServingOptionsWithLoopback,
	args []string) (*Server, error) {
	t.Helper()
	data := filepath.Join(dir, "watershed")
	if err := os.MkdirAll(data, 0o700); err != nil {
		return nil, err
	}
	tokenFile := filepath.Join(data, "tokens.csv")
	if err := writeTokens(tokenFile, tokens); err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(secure.ServerCert.CertKey.CertFile)
	if err != nil {
		return nil, err
	}
	name, err := serverName(ca)
	if err != nil {
		return nil, err
	}
	port := secure.Listener.Addr().(*net.TCPAddr).Port
	args = slices.Concat([]string{
		"--data-dir=" + data,
		"--bind-address=127.0.0.1",
		"--secure-port=" + strconv.Itoa(port),
		"--token-auth-file=" + tokenFile,
	}, args)
	if gates := gates(); len(gates) > 0 {
		args = append(args, "--feature-gates="+strings.Join(gates, ","))
	}
	t.Logf("kube-apiserver %s", strings.Join(args, " "))
	if err := secure.Listener.Close(); err != nil {
		return nil, err
	}
	output, err := os.Create(filepath.Join(data, "output.log"))
	if err != nil {
		return nil, err
	}
	defer output.Close()
	cmd := exec.Command(filepath.Join(filepath.Dir(os.Getenv(Binary)), "kube-apiserver"), args...)
	cmd.Stdout, cmd.Stderr = output, output // and the directory of the test: flags may have relative paths
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	server := &Server{
		Client: &rest.Config{
			Host:            "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
			BearerToken:     token,
			TLSClientConfig: rest.TLSClientConfig{CAData: ca, ServerName: name},
			QPS:             50,
			Burst:           100,

			DisableCompression: true,
		},
		Ended: make(chan error, 1),
	}
	go func() {
		defer close(server.Ended)
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case err := <-ended:
			server.Ended <- fmt.Errorf("watershed ended: %w: %s", err, lastLine(output.Name()))
		case <-ctx.Done():
			stop(cmd, ended)
		}
		if t.Failed() {
			keepLogs(t.Name(), data)
		}
	}()
	return server, nil
}

// serverName returns a name of a serving certificate that lacks the address of the listener, and "" for others.
func serverName(pem []byte) (string, error) {
	certs, err := cert.ParseCertsPEM(pem)
	if err != nil {
		return "", err
	}
	if certs[0].VerifyHostname("127.0.0.1") == nil || len(certs[0].DNSNames) == 0 {
		return "", nil
	}
	return certs[0].DNSNames[0], nil
}

// stop ends a process with SIGTERM, and with SIGKILL if it takes a minute.
func stop(cmd *exec.Cmd, ended <-chan error) {
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-ended:
	case <-time.After(time.Minute):
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
	}
}

// writeTokens writes a token file with the client's token and the lines of the file more, unless more is "".
func writeTokens(path, more string) error {
	lines := []byte(token + `,system:apiserver,loopback,"system:masters"` + "\n")
	if more != "" {
		own, err := os.ReadFile(more)
		if err != nil {
			return err
		}
		lines = append(lines, own...)
	}
	return os.WriteFile(path, lines, 0o600)
}

// dropped lists the flags that the harness sets otherwise, and flags that Watershed rejects.
var dropped = []string{"bind-address", "cert-dir", "emulated-version", "external-hostname", "feature-gates",
	"peer-ca-file", "requestheader-client-ca-file", "secure-port", "token-auth-file", "watch-cache"}

// flags returns the arguments that give a server the options of s. The test's process has completed s from files and
// from the external signer; the server does so itself.
func flags(s *options.ServerRunOptions) (args []string) {
	defaults := allFlags(options.NewServerRunOptions())
	allFlags(s).VisitAll(func(f *pflag.Flag) {
		value := f.Value.String()
		isDefault := value == defaults.Lookup(f.Name).DefValue
		configured := f.Name == "authorization-mode" && s.Authorization.AuthorizationConfigurationFile != "" ||
			f.Name == "service-account-max-token-expiration" && s.ServiceAccountSigningEndpoint != ""
		if !isDefault && !configured && !slices.Contains(dropped, f.Name) {
			args = append(args, arguments(f)...)
		}
	})
	if ttl := s.Authentication.TokenSuccessCacheTTL; ttl != 10*time.Second { // no flag of kube-apiserver
		args = append(args, "--authentication-cache-ttl="+ttl.String())
	}
	if ca := s.Authentication.RequestHeader.ClientCAFile; ca != "" {
		args = append(args, "--requestheader-client-ca-file="+ca)
	}
	return args
}

func allFlags(s *options.ServerRunOptions) *pflag.FlagSet {
	all := pflag.NewFlagSet("kube-apiserver", pflag.ContinueOnError)
	sets := s.Flags()
	for _, fs := range sets.FlagSets {
		all.AddFlagSet(fs)
	}
	return all
}

// arguments returns a flag with its value as the command line has it.
func arguments(f *pflag.Flag) []string {
	values := []string{f.Value.String()}
	switch v := f.Value.(type) {
	case pflag.SliceValue:
		values = v.GetSlice()
		if len(values) == 0 {
			values = []string{""}
		}
		if f.Value.Type() == "stringSlice" {
			values = []string{csvLine(values)}
		}
	default:
		switch list := strings.Trim(v.String(), "[]"); f.Value.Type() {
		case "namedCertKey":
			values = strings.Split(list, ";")
		case "stringSlice": // a flag of OIDC, whose wrapper hides the slice
			values = []string{list}
		}
	}
	args := make([]string, len(values))
	for i, v := range values {
		args[i] = "--" + f.Name + "=" + v
	}
	return args
}

func csvLine(values []string) string {
	var b bytes.Buffer
	w := csv.NewWriter(&b)
	_ = w.Write(values)
	w.Flush()
	return strings.TrimSuffix(b.String(), "\n")
}

// rejected lists the gates that Watershed rejects unless they are off. AllAlpha enables them.
var rejected = []featuregate.Feature{"StorageVersionAPI"}

// gates returns the feature gates of the test process that differ from their defaults. AllAlpha and AllBeta change the
// defaults of their gates.
func gates() (changed []string) {
	all := utilfeature.DefaultMutableFeatureGate.GetAll()
	enabled := utilfeature.DefaultFeatureGate.Enabled
	for _, name := range slices.Sorted(maps.Keys(all)) {
		usual := all[name].Default
		switch all[name].PreRelease {
		case featuregate.Alpha:
			usual = usual || enabled("AllAlpha") && name != "AllAlpha"
		case featuregate.Beta:
			usual = usual || enabled("AllBeta") && name != "AllBeta"
		}
		on := enabled(name)
		if on && on == usual && slices.Contains(rejected, name) {
			on = false
		}
		if on != usual {
			changed = append(changed, fmt.Sprintf("%s=%t", name, on))
		}
	}
	return changed
}

func lastLine(path string) string {
	b, _ := os.ReadFile(path)
	b = bytes.TrimSpace(b)
	return string(b[bytes.LastIndexByte(b, '\n')+1:])
}

// keepLogs copies the logs of a failed test's server.
func keepLogs(test, data string) {
	dir := os.Getenv(Logs)
	if dir == "" {
		return
	}
	name := strings.NewReplacer("/", "_", " ", "_").Replace(test)
	for _, log := range []string{"output.log", "watershed.log"} {
		b, _ := os.ReadFile(filepath.Join(data, log))
		_ = os.WriteFile(filepath.Join(dir, name[:min(len(name), 150)]+"-"+log), b, 0o600)
	}
}
