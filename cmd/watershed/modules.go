package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"watershed.dev/cmd/watershed/check"
	"watershed.dev/platform/config"
	"watershed.dev/platform/process"
	"watershed.dev/services/admission"
	"watershed.dev/services/authn"
	"watershed.dev/services/authz"
	"watershed.dev/services/gateway"
	"watershed.dev/services/registry"
	"watershed.dev/services/watchfanout"
)

// modules is the table of the services. Each module names the services that it calls. They start before it.
var modules = process.Modules{
	registry.Module,
	watchfanout.Module,
	authn.Module,
	authz.Module,
	admission.Module,
	gateway.Module,
}

// set is a set of services that share a process.
type set struct {
	// name is the name of the processes of the set.
	name    string
	targets []string
	// replicas is the default number of processes.
	replicas int
}

// placements maps the values of --placement to the sets of services. etcd, NATS and the xDS server have processes of
// their own, except in `up`.
var placements = map[string][]set{
	"all": {{"watershed", modules.Names(), 1}},
	"compact": {
		{"front", []string{"gateway", "authn", "authz", "admission", "registry"}, 2},
		{"watchfanout", []string{"watchfanout"}, 2},
	},
	"split": {
		{"registry", []string{"registry"}, 2},
		{"watchfanout", []string{"watchfanout"}, 2},
		{"authn", []string{"authn"}, 1},
		{"authz", []string{"authz"}, 1},
		{"admission", []string{"admission"}, 1},
		{"gateway", []string{"gateway"}, 2},
	},
}

// runCommand runs the services that --target names in args, or that the configuration file names.
func runCommand(args []string) process.Command {
	return func(flags *pflag.FlagSet) func() error {
		targets, err := targetsOf(args)
		if err == nil {
			_, err = modules.Sort(targets)
		}
		if err == nil {
			return modules.Command(targets, disableAnonymous)(flags)
		}
		modules.Command(modules.Names())(flags) // for the help
		return func() error { return err }
	}
}

// checkCommand is check.Command. If args set --pre, it also has the flags of `up`, which its help does not list.
func checkCommand(args []string) process.Command {
	return func(flags *pflag.FlagSet) func() error {
		run := check.Command(flags)
		pre := false
		if err := loadFirst(args, func(fs *pflag.FlagSet) { fs.BoolVar(&pre, "pre", false, "") }); err != nil {
			return func() error { return err }
		}
		if pre {
			up := pflag.NewFlagSet("up", pflag.ContinueOnError)
			newUpFlags(up)
			up.VisitAll(func(f *pflag.Flag) {
				if flags.Lookup(f.Name) == nil {
					f.Hidden = true
					flags.AddFlag(f)
				}
			})
		}
		return run
	}
}

// targetsOf returns the value of --target.
func targetsOf(args []string) (targets []string, err error) {
	err = loadFirst(args, func(fs *pflag.FlagSet) { fs.StringSliceVar(&targets, "target", nil, "") })
	if err == nil && len(targets) == 0 {
		err = fmt.Errorf("--target is required: want a list of %s", strings.Join(modules.Names(), ", "))
	}
	return targets, err
}

// loadFirst loads the flags that add registers, and ignores all others. These flags decide which others exist.
func loadFirst(args []string, add func(*pflag.FlagSet)) error {
	fs := pflag.NewFlagSet("watershed", pflag.ContinueOnError)
	fs.Usage = func() {}
	fs.ParseErrorsAllowlist.UnknownFlags = true
	add(fs)
	if err := config.Load(fs, args); err != nil && !errors.Is(err, pflag.ErrHelp) {
		return err
	}
	return nil
}

// alwaysAllow is the authorization mode that allows every request.
const alwaysAllow = "AlwaysAllow"

// disableAnonymous disables anonymous requests if every request is allowed, even if --anonymous-auth is set, as
// kube-apiserver does (k8s.io/kubernetes/pkg/kubeapiserver/options, ApplyAuthorization). It does not set the flag
// beside --authentication-config, because the file's `anonymous` section excludes the flag. In this case the gateway
// rejects anonymous requests by Authz.PolicyRevisions. If authn and authz have processes and flags of their own, it
// does so too.
func disableAnonymous(fs *pflag.FlagSet) {
	modes, err := fs.GetStringSlice("authorization-mode")
	file, _ := fs.GetString("authentication-config")
	if err == nil && slices.Contains(modes, alwaysAllow) && file == "" && fs.Lookup("anonymous-auth") != nil {
		_ = fs.Set("anonymous-auth", "false") // the flag is a bool
	}
}

// checkFairness returns an error if --runtime-config disables the API of flow control, as kube-apiserver does
// (k8s.io/kubernetes/pkg/controlplane/apiserver/options, validateAPIPriorityAndFairness). If gateway and registry have
// processes and flags of their own, the gateway's check `fairness` reports it.
func checkFairness(fs *pflag.FlagSet) error {
	if enabled, _ := fs.GetBool("enable-priority-and-fairness"); !enabled {
		return nil
	}
	served := fs.Lookup("runtime-config").Value.String()
	for _, key := range []string{"flowcontrol.apiserver.k8s.io/v1", "api/ga", "api/all"} { // by precedence
		if strings.Contains(served, key+"=false") {
			return fmt.Errorf("--runtime-config=%s=false conflicts with --enable-priority-and-fairness=true", key)
		}
		if strings.Contains(served, key+"=true") {
			return nil
		}
	}
	return nil
}

// placementNames returns the values of --placement.
func placementNames() []string { return slices.Sorted(maps.Keys(placements)) }
