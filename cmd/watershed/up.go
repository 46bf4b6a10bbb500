package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/cmd/embedded"
	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/version"
	"watershed.dev/services/registry/storage"
)

// up runs everything in this process.
func up(flags *pflag.FlagSet) func() error { return newUpFlags(flags).run }

// run runs everything with the flags until SIGINT or SIGTERM.
func (fs *upFlags) run() error {
	began := time.Now()
	l, err := fs.open(fs.FlagSet)
	if err != nil {
		return err
	}
	defer l.close()
	runners, err := fs.stores(l)
	if err != nil {
		return err
	}
	logFile := fs.logs.open(filepath.Join(l.dir, "watershed.log"))
	defer logFile.Close()
	var logs, terminal io.Writer = logFile, os.Stdout
	if fs.upstream {
		logs, terminal = os.Stderr, io.Discard
	}
	show := &progress{w: terminal}
	ctx, cancel := lifecycle.SignalContext()
	defer cancel()
	t := &fs.process.Telemetry
	flush, err := t.Start(ctx, "watershed", logs)
	if err != nil {
		return err
	}
	defer flush()
	if t.DebugAddress == "" {
		t.DebugAddress = filepath.Join(l.sockets, inspect.DebugSocket)
	}
	services, err := fs.process.Runners(ctx)
	if err != nil {
		return err
	}
	runners = append(runners, services...)
	if fs.controllers.enabled {
		r, err := fs.controllers.runner(l, show)
		if err != nil {
			return err
		}
		runners = append(runners, r)
	}
	go l.pki.Renew(ctx)
	show.say("Watershed %s starts in %s", version.Release(), l.dir)
	return lifecycle.Run(ctx, runners, observe(show, runners, func() {
		l.recordEtcdServers(fs.external)
		show.say(
			"Ready after %.1f s.\n\n  export KUBECONFIG=%s\n  kubectl get namespaces\n\nLogs are in %s. Ctrl-C stops.",
			time.Since(began).Seconds(),
			l.pki.AdminKubeconfig(),
			logFile.Filename,
		)
	}))
}

// observe returns an observer that shows the progress of runners. onStarted is called once all are ready.
func observe(show *progress, runners []lifecycle.Runner, onStarted func()) lifecycle.Observer {
	stopped := func() {}
	return lifecycle.Observer{
		Starting: func(name string) {
			show.started("")
			i := slices.IndexFunc(runners, func(r lifecycle.Runner) bool { return r.Name == name })
			show.starting(name, func() error {
				if runners[i].Ready == nil {
					return nil
				}
				return runners[i].Ready.Err()
			})
		},
		Started: func() {
			show.started("")
			onStarted()
		},
		Stopping: func(name string, timeout time.Duration) {
			show.failed()
			stopped()
			stopped = show.stopping(name, timeout)
		},
	}
}

// upFlags holds the flags of the command, and the process of all services.
type upFlags struct {
	*pflag.FlagSet
	directory
	controllers controllers
	process     *process.Process
	// upstream is true for the command kube-apiserver, which has kube-apiserver's defaults and logs to standard error.
	upstream bool
	// external are the servers of an etcd outside of the data directory.
	external []string
}

func newUpFlags(flags *pflag.FlagSet) *upFlags {
	p := newProcess(placements["all"][0].targets)
	fs := &upFlags{FlagSet: flags, process: p}
	fs.directory.addFlags(fs.FlagSet)
	fs.controllers.addFlags(fs.FlagSet)
	p.AddFlags(fs.FlagSet)
	return fs
}

// stores returns the runners of etcd and NATS, unless the flags name servers. It configures the services for them.
func (fs *upFlags) stores(l *layout) (runners []lifecycle.Runner, err error) {
	settings := l.settings(fs.FlagSet)
	if fs.upstream {
		settings = l.upstreamSettings(fs.FlagSet)
	}
	fs.external, _ = fs.GetStringSlice("etcd-servers")
	command := "up"
	if fs.upstream {
		command = "kube-apiserver"
	}
	if err := l.checkEtcdServers(command, fs.external); err != nil {
		return nil, err
	}
	if len(fs.external) == 0 {
		if err := l.checkEtcdMembers(1); err != nil {
			return nil, err
		}
		socket := "unix://" + filepath.Join(l.sockets, "etcd.sock")
		settings["etcd-servers"] = socket
		runners = append(runners, (&embedded.Etcd{Dir: filepath.Join(l.dir, "etcd"), Listen: socket}).Runner())
	}
	if natsURL, _ := fs.GetString("nats-url"); natsURL == "" {
		if settings["log-name"], err = l.logName(); err != nil {
			return nil, err
		}
		log := &embedded.NATS{Dir: filepath.Join(l.dir, "nats"), KeyFile: l.pki.JetStreamKey()}
		runners = append(runners, log.Runner())
		fs.process.NATS = func() process.InProcessNATS { return log }
	}
	if err := config.FillDefaults(fs.FlagSet, settings); err != nil {
		return nil, err
	}
	if err := l.createServingCert(fs.FlagSet); err != nil {
		return nil, err
	}
	disableAnonymous(fs.FlagSet)
	if err := checkFairness(fs.FlagSet); err != nil {
		return nil, err
	}
	fs.process.Identity = l.pki.Identity
	if err := fs.process.Configure(fs.FlagSet); err != nil || fs.process.NATS == nil {
		return runners, err
	}
	return runners, checkLogs(fs.FlagSet)
}

// checkLogs returns an error if the NATS servers of a command cannot reserve the bytes of its event logs. A registry
// rejects overrides that are invalid.
func checkLogs(flags *pflag.FlagSet) error {
	kind, _ := flags.GetString("log-storage")
	bytes, _ := flags.GetInt64("log-max-bytes")
	var etcd storage.Options
	etcd.Servers, _ = flags.GetStringSlice("etcd-servers") // split has no such flag
	etcd.Overrides, _ = flags.GetStringSlice("etcd-servers-overrides")
	number, err := etcd.Logs()
	if err != nil {
		return nil
	}
	return embedded.CheckLogs(kind, bytes, number)
}
