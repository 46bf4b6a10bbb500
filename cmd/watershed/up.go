package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"google.golang.org/grpc"

	"watershed.dev/cmd/embedded"
	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/version"
)

// up runs everything in this process.
func up(args []string) error {
	began := time.Now()
	fs := newUpFlags()
	if err := config.Load(fs.FlagSet, args); err != nil {
		return process.ExitOnHelp(err)
	}
	port, _ := fs.GetInt("secure-port")
	bind, _ := fs.GetString("bind-address")
	l, err := openLayout(fs.dataDir, bind, port, append(fs.hosts, advertised(fs.FlagSet)...), fs.logs)
	if err != nil {
		return err
	}
	defer l.close()
	logFile := fs.logs.open(filepath.Join(l.dir, "watershed.log"))
	defer logFile.Close()
	ctx, cancel := lifecycle.SignalContext()
	defer cancel()
	t := &fs.telemetry
	flush, err := t.Start(ctx, "watershed", logFile)
	if err != nil {
		return err
	}
	defer flush()
	if t.DebugAddress == "" {
		t.DebugAddress = filepath.Join(l.sockets, debugSocket)
	}
	u := &upRun{
		layout:    l,
		flags:     fs.FlagSet,
		all:       fs.all,
		transport: rpc.NewInProcess(telemetry.TracingEnabled()),
	}
	runners, err := u.runners(t, &fs.controllers)
	if err != nil {
		return err
	}
	go l.pki.Renew(ctx)
	show := newProgressPrinter(os.Stdout)
	show.say("Watershed %s starts in %s", version.Release(), l.dir)
	return lifecycle.Run(ctx, runners, show.starting, func() {
		show.done()
		show.say(
			"Ready after %.1f s.\n\n  export KUBECONFIG=%s\n  kubectl get namespaces\n\nLogs are in %s. Ctrl-C stops.",
			time.Since(began).Seconds(),
			l.pki.AdminKubeconfig(),
			logFile.Filename,
		)
	})
}

// upFlags holds the flags of the command and of every service.
type upFlags struct {
	*pflag.FlagSet
	dataDir     string
	hosts       []string
	telemetry   telemetry.Options
	logs        logFiles
	controllers controllers
	all         map[string]*service
}

func newUpFlags() *upFlags {
	fs := &upFlags{FlagSet: pflag.NewFlagSet("watershed up", pflag.ContinueOnError), all: map[string]*service{}}
	fs.StringVar(&fs.dataDir, "data-dir", ".watershed",
		"The directory of all data: certificates, etcd, the event log, admin.kubeconfig.")
	fs.StringSliceVar(&fs.hosts, "tls-sans", nil, "Additional names and addresses of the serving certificate.")
	fs.telemetry.AddFlags(fs.FlagSet)
	fs.logs.addFlags(fs.FlagSet)
	fs.controllers.addFlags(fs.FlagSet)
	for _, m := range modules {
		fs.all[m.Name] = newService(m, fs.FlagSet)
	}
	return fs
}

// service holds the flags, the options and later the instance of one service.
type service struct {
	flags    *pflag.FlagSet
	options  process.Options
	instance process.Service
}

// newService registers the flags of a service in its own flag set, and adds the missing ones to fs.
func newService(m *process.Module, fs *pflag.FlagSet) *service {
	b := &service{flags: pflag.NewFlagSet(m.Name, pflag.ContinueOnError), options: m.Options()}
	b.options.AddFlags(b.flags)
	addMissingFlags(b.flags, fs)
	return b
}

// addMissingFlags adds the flags of a service to a command, except the flags that the command already has and those in
// except.
func addMissingFlags(service, command *pflag.FlagSet, except ...string) {
	service.VisitAll(func(f *pflag.Flag) {
		if command.Lookup(f.Name) == nil && !slices.Contains(except, f.Name) {
			command.AddFlag(f)
		}
	})
}

// copyFlags copies the flags of the command line to the service. It must run for all services before applyDefaults of
// any service, because services share the command's flags of the same name.
func (b *service) copyFlags(command *pflag.FlagSet) error {
	var errs []error
	b.flags.VisitAll(func(f *pflag.Flag) {
		flag := command.Lookup(f.Name)
		if flag == nil || flag == f || !flag.Changed {
			return
		}
		errs = append(errs, copyValue(b.flags, f, flag))
	})
	return errors.Join(errs...)
}

// applyDefaults sets the flags that the command line omits to the settings of the data directory.
func (b *service) applyDefaults(settings map[string]any) error {
	v := viper.NewWithOptions(viper.KeyDelimiter("\x00"))
	for name, value := range settings {
		v.Set(name, value)
	}
	return config.FillUnset(b.flags, v, "")
}

func copyValue(fs *pflag.FlagSet, to, from *pflag.Flag) error {
	if s, ok := from.Value.(pflag.SliceValue); ok {
		if d, ok := to.Value.(pflag.SliceValue); ok {
			to.Changed = true
			return d.Replace(s.GetSlice())
		}
		return fs.Set(to.Name, strings.Join(s.GetSlice(), ","))
	}
	return fs.Set(to.Name, from.Value.String())
}

// upRun assembles the runners of `up` in one process.
type upRun struct {
	*layout
	flags     *pflag.FlagSet
	all       map[string]*service
	transport *rpc.InProcess
	nats      *server.Server
}

func (u *upRun) runners(t *telemetry.Options, withControllers *controllers) ([]lifecycle.Runner, error) {
	var runners []lifecycle.Runner
	external, _ := u.flags.GetStringSlice("etcd-servers")
	socket := "unix://" + filepath.Join(u.sockets, "etcd.sock")
	if len(external) == 0 {
		runners = append(runners, (&embedded.Etcd{Dir: filepath.Join(u.dir, "etcd"), Listen: socket}).Runner())
	}
	natsURL, _ := u.flags.GetString("nats-url")
	if natsURL == "" {
		log := &embedded.NATS{Dir: filepath.Join(u.dir, "nats"), KeyFile: u.pki.JetStreamKey()}
		runners = append(runners, log.Runner(func(s *server.Server) { u.nats = s }))
	}
	values := map[string]any{} // read before applyDefaults, because services share flags
	u.flags.Visit(func(f *pflag.Flag) { values[f.Name] = config.FileValue(f) })
	fromCommandLine := func(flag string) any { return values[flag] }
	for _, m := range modules {
		if err := u.all[m.Name].copyFlags(u.flags); err != nil {
			return nil, err
		}
	}
	if err := u.disableAnonymous(); err != nil {
		return nil, err
	}
	for _, m := range modules {
		name := m.Name
		settings := u.settingsFor(name, fromCommandLine)
		if name == "registry" && len(external) == 0 {
			settings["etcd-servers"] = socket
		}
		if name == "gateway" {
			settings["gets-from-watch-tier"] = true // in one process the watch cache is cheaper than the registry
		}
		if err := u.all[name].applyDefaults(settings); err != nil {
			return nil, err
		}
		runners = append(runners, u.serviceRunner(name))
	}
	runners = append(runners, u.policiesRunner())
	if withControllers.enabled {
		p, err := withControllers.runner(u.layout)
		if err != nil {
			return nil, err
		}
		runners = append(runners, p)
	}
	return append(runners, lifecycle.Runner{Name: "debug", Run: func(ctx context.Context) error {
		metrics, pages := process.NewMetrics(), &process.Instance{Name: "watchfanout"}
		for _, m := range modules {
			metrics.Add(u.all[m.Name].instance)
		}
		pages.Set(u.all["watchfanout"].instance)
		shown := pages.Pages()
		shown["/files"] = http.HandlerFunc(u.showFiles)
		return t.ServeDebug(ctx, metrics, shown)
	}}), nil
}

// showFiles serves the files that the services of this process reload.
func (u *upRun) showFiles(w http.ResponseWriter, r *http.Request) {
	for _, m := range modules {
		if s, ok := u.all[m.Name].instance.(interface{ Files() http.Handler }); ok {
			s.Files().ServeHTTP(w, r)
		}
	}
}

// alwaysAllow is the authorization mode that allows every request.
const alwaysAllow = "AlwaysAllow"

// disableAnonymous disables anonymous requests if every request is allowed, even if --anonymous-auth is set, as
// kube-apiserver does (k8s.io/kubernetes/pkg/kubeapiserver/options, ApplyAuthorization).
func (u *upRun) disableAnonymous() error {
	modes, err := u.all["authz"].flags.GetStringSlice("authorization-mode")
	if err != nil || !slices.Contains(modes, alwaysAllow) {
		return err
	}
	slog.Warn("--authorization-mode AlwaysAllow cannot be used with --anonymous-auth: anonymous requests are disabled")
	return u.all["authn"].flags.Set("anonymous-auth", "false")
}

// policiesRunner returns a runner that only reports readiness. It is ready once authz and admission have read their
// policies. From then on no request is rejected because of unread policies.
func (u *upRun) policiesRunner() lifecycle.Runner {
	ready := &lifecycle.Readiness{}
	services := []string{"authz", "admission"}
	for _, name := range services {
		ready.Set(name, errors.New("it is starting"))
	}
	return lifecycle.Runner{Name: "policies", Ready: ready, Run: func(ctx context.Context) error {
		for _, name := range services {
			if s, ok := u.all[name].instance.(interface{ Policies() *lifecycle.Readiness }); ok {
				go s.Policies().OnChange(ctx, func(reason error) { ready.Set(name, reason) })
			} else {
				ready.Set(name, nil)
			}
		}
		<-ctx.Done()
		return nil
	}}
}

// serviceRunner builds a service when its runner starts, because the service may need the services before it.
func (u *upRun) serviceRunner(name string) lifecycle.Runner {
	b := u.all[name]
	ready := lifecycle.NotReady(name)
	return lifecycle.Runner{Name: name, Ready: ready, Run: func(ctx context.Context) error {
		s, err := b.options.Build(ctx, u.deps(name))
		if err != nil {
			return err
		}
		s.Register(u.transport)
		b.instance = s
		go s.Ready().OnChange(ctx, func(reason error) { ready.Set(name, reason) })
		return s.Run(ctx)
	}}
}

// deps returns the dependencies with which a service of this process is built.
func (u *upRun) deps(name string) *process.Deps {
	d := &process.Deps{
		ID:   u.pki.Identity(name),
		Dial: func(string) (grpc.ClientConnInterface, error) { return u.transport.Client(name), nil },
	}
	if u.nats != nil {
		d.NATS = u.nats
	}
	return d
}

// progressPrinter prints a line for each runner that starts.
type progressPrinter struct {
	w     io.Writer
	began time.Time
	last  string
}

func newProgressPrinter(w io.Writer) *progressPrinter { return &progressPrinter{w: w} }

func (s *progressPrinter) say(format string, args ...any) { fmt.Fprintf(s.w, format+"\n", args...) }

func (s *progressPrinter) starting(name string) {
	s.done()
	s.last, s.began = name, time.Now()
	fmt.Fprintf(s.w, "  %-12s ", name)
}

func (s *progressPrinter) done() {
	if s.last != "" {
		fmt.Fprintf(s.w, "%5d ms\n", time.Since(s.began).Milliseconds())
		s.last = ""
	}
}
