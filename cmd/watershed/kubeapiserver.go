package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"

	"github.com/spf13/pflag"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/version/verflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/kubeversion"
)

// kubeAPIServerName is the name of the command kube-apiserver. A binary or a link with this name runs the command.
const kubeAPIServerName = "kube-apiserver"

var kubeAPIServerCommand = command{kubeAPIServerName, "", whole,
	"Run everything in this process, with kube-apiserver's flags and defaults", kubeAPIServer}

// kubeAPIServer runs everything in this process, as `watershed up`, with the flags and the defaults of kube-apiserver.
// Programs that start kube-apiserver by its flags can start it: kubeadm's manifest, envtest, kind.
func kubeAPIServer(flags *pflag.FlagSet) func() error {
	fs := newKubeAPIServerFlags(flags)
	return func() error {
		if fs.printVersion() {
			return nil
		}
		if err := fs.checkRequired(); err != nil {
			return err
		}
		if fs.dataDir == "" {
			port, _ := fs.GetInt("secure-port")
			fs.dataDir = filepath.Join(fs.certDir, fmt.Sprintf("watershed-%d", port))
		}
		return fs.run()
	}
}

// versionFlag is kube-apiserver's --version. It leaves pflag.CommandLine, whose flags cobra adds to every command.
var versionFlag = func() *pflag.Flag {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	verflag.AddFlags(fs)
	pflag.CommandLine = pflag.NewFlagSet("", pflag.ContinueOnError)
	return fs.Lookup("version")
}()

// newKubeAPIServerFlags adds the flags of up to flags, with the names and defaults of kube-apiserver's.
func newKubeAPIServerFlags(flags *pflag.FlagSet) *upFlags {
	fs := newUpFlags(flags)
	fs.upstream = true
	fs.SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
	setDefault := func(name, value string) {
		f := fs.Lookup(name)
		_ = f.Value.Set(value) // a string
		f.DefValue = value
	}
	setDefault("cert-dir", "/var/run/kubernetes")
	setDefault("data-dir", "")
	fs.Lookup("data-dir").Usage = "The directory of the event log and the certificates of the services. " +
		"Empty: watershed-PORT in --cert-dir."
	fs.AddFlag(versionFlag)
	return fs
}

// printVersion prints the version as kube-apiserver does if --version is set.
func (fs *upFlags) printVersion() (done bool) {
	switch fs.Lookup("version").Value.String() {
	case "true":
		fmt.Println("Kubernetes", kubeversion.Info().GitVersion)
	case "raw":
		fmt.Printf("%#v\n", *kubeversion.Info())
	default: // false, or the version to report, which the flag has set
		return false
	}
	return true
}

// checkRequired returns an error for each flag that kube-apiserver requires, in its words.
func (fs *upFlags) checkRequired() error {
	var errs []error
	check := func(ok bool, text string) {
		if !ok {
			errs = append(errs, errors.New(text))
		}
	}
	external := fs.Changed("service-account-signing-endpoint")
	check(fs.Changed("etcd-servers"), "--etcd-servers must be specified")
	check(fs.Changed("service-account-issuer"), "service-account-issuer is a required flag")
	check(fs.Changed("service-account-key-file") || external,
		"either `--service-account-key-file` or `--service-account-signing-endpoint` must be set")
	check(fs.Changed("service-account-signing-key-file") || external,
		"--service-account-signing-key-file and --service-account-issuer are required flags")
	return utilerrors.NewAggregate(errs)
}

// upstreamDefault is a default of kube-apiserver that differs from the default of `up`.
type upstreamDefault struct {
	name string
	// unless is a flag that excludes the default.
	unless string
	value  any
}

var upstreamDefaults = []upstreamDefault{
	{"authorization-mode", "authorization-config", []string{alwaysAllow}},
	{"service-cluster-ip-range", "", "10.0.0.0/24"},
	{"allow-privileged", "", false},
	{"enable-admission-plugins", "", []string{}},
	{"kubelet-certificate-authority", "", ""},
	{"enable-bootstrap-token-auth", "", false},
	// without these flags kube-apiserver accepts no user name from a front proxy
	{"requestheader-username-headers", "", []string{}},
	{"requestheader-group-headers", "", []string{}},
	{"requestheader-extra-headers-prefix", "", []string{}},
}

// upstreamSettings returns the settings of the services for kube-apiserver's flags, by flag name. Other than settings
// it uses no certificate or key of the directory for the cluster. fs has the flags.
func (l *layout) upstreamSettings(fs *pflag.FlagSet) map[string]any {
	settings := l.innerSettings()
	for _, d := range upstreamDefaults {
		if !fs.Changed(cmp.Or(d.unless, d.name)) {
			settings[d.name] = d.value
		}
	}
	if issuers := fs.Lookup("service-account-issuer"); issuers.Changed {
		settings["api-audiences"] = config.FileValue(issuers)
	}
	if l.certDir != "" {
		maps.Copy(settings, l.certSettings())
	}
	return settings
}
