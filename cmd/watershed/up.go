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

// upFlags are the command's flags and those of every service.
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
		"Where everything is kept: certificates, etcd, the event log, admin.kubeconfig.")
	fs.StringSliceVar(&fs.hosts, "tls-sans", nil, "Further names and addresses for the serving certificate.")
	fs.telemetry.AddFlags(fs.FlagSet)
	fs.logs.addFlags(fs.FlagSet)
	fs.controllers.addFlags(fs.FlagSet)
	for _, m := range modules {
		fs.all[m.Name] = newService(m, fs.FlagSet)
	}
	return fs
}

// service is one service on its way.
type service struct {
	flags    *pflag.FlagSet
	options  process.Options
	instance process.Service
}

// newService gives a service flags of its own and shows those that fs lacks there.
func newService(m *process.Module, fs *pflag.FlagSet) *service {
	b := &service{flags: pflag.NewFlagSet(m.Name, pflag.ContinueOnError), options: m.Options()}
	b.options.AddFlags(b.flags)
	addMissingFlags(b.flags, fs)
	return b
}

// addMissingFlags adds a service's flags to a command's that lacks them, but for some.
func addMissingFlags(service, command *pflag.FlagSet, except ...string) {
	service.VisitAll(func(f *pflag.Flag) {
		if command.Lookup(f.Name) == nil && !slices.Contains(except, f.Name) {
			command.AddFlag(f)
		}
	})
}

// copyFlags hands the service what the command was told. It comes before any service is told what the data directory
// says, since services share the command's flags of one name.
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

// applyDefaults sets what the command was not told to what the data directory says.
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

// upRun puts the parts of one process together.
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
	values := map[string]any{} // before any service is told what the directory says: they share flags
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
			settings["gets-from-watch-tier"] = true // in one process the tier is the cheaper one to ask
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

// showFiles shows the files that any service of this process reads anew.
func (u *upRun) showFiles(w http.ResponseWriter, r *http.Request) {
	for _, m := range modules {
		if s, ok := u.all[m.Name].instance.(interface{ Files() http.Handler }); ok {
			s.Files().ServeHTTP(w, r)
		}
	}
}

// alwaysAllow is the authorization mode by which everybody may do everything.
const alwaysAllow = "AlwaysAllow"

// disableAnonymous turns anonymous requests away where everybody may do everything, also where they were asked for, as
// kube-apiserver does (k8s.io/kubernetes/pkg/kubeapiserver/options, ApplyAuthorization).
func (u *upRun) disableAnonymous() error {
	modes, err := u.all["authz"].flags.GetStringSlice("authorization-mode")
	if err != nil || !slices.Contains(modes, alwaysAllow) {
		return err
	}
	slog.Warn("--authorization-mode AlwaysAllow cannot be used with --anonymous-auth: that is off")
	return u.all["authn"].flags.Set("anonymous-auth", "false")
}

// policiesRunner runs nothing: it is ready once authz and admission have read what they decide by, from when on nobody is
// refused for that.
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

// serviceRunner builds a service when its turn has come, since it may need those before it to be built.
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

// deps is what a service of this process is built with.
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

// progressPrinter tells in one line what is being started.
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
