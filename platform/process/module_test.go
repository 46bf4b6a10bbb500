package process

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// table is a table of services with the names that rpc.AllowedClients has, and without behaviour.
func table() Modules {
	stopTimeouts := map[string]func() time.Duration{"gateway": func() time.Duration { return time.Minute }}
	options := func(name string) func() Options {
		return func() Options {
			return Options{
				AddFlags: func(fs *pflag.FlagSet) {
					fs.String("kubeconfig", "", "")
					fs.Int("of-"+name, 0, "")
					fs.StringSlice("shared", []string{name}, "")
				},
				Validate:    func() error { return nil },
				StopTimeout: stopTimeouts[name],
			}
		}
	}
	return Modules{
		{Name: "gateway", DependsOn: []string{"authn", "registry", "watchfanout"}, ServesAPI: true,
			Options: options("gateway")},
		{Name: "watchfanout", DependsOn: []string{"registry"}, Options: options("watchfanout")},
		{Name: "authn", Options: options("authn")},
		{Name: "registry", Options: options("registry")},
	}
}

// Services start after the services that they call, and the gateway starts last.
func TestSort(t *testing.T) {
	for targets, want := range map[string]string{
		"gateway,watchfanout,authn,registry": "registry,watchfanout,authn,gateway",
		"watchfanout,gateway":                "watchfanout,gateway",
		"gateway,authn,authn":                "authn,gateway",
		"gateway":                            "gateway",
	} {
		sorted, err := table().Sort(strings.Split(targets, ","))
		if got := strings.Join(sorted.Names(), ","); got != want || err != nil {
			t.Errorf("%s: %s, %v", targets, got, err)
		}
	}
	if _, err := table().Sort([]string{"authn", "absent"}); err == nil ||
		err.Error() != "--target=absent: no such service: want any of gateway, watchfanout, authn, registry" {
		t.Errorf("an unknown target: %v", err)
	}
}

// A process serves on the network the services that others call, and needs the addresses of the services that it calls.
func TestNetworkOfASet(t *testing.T) {
	for targets, want := range map[string][2]string{
		"gateway":                            {"", "authn registry watchfanout"},
		"authn":                              {"authn", ""},
		"gateway,authn,registry":             {"registry", "watchfanout"},
		"watchfanout,registry":               {"watchfanout registry", ""},
		"gateway,authn,registry,watchfanout": {"", ""},
	} {
		p, err := New(table(), strings.Split(targets, ","))
		if err != nil {
			t.Fatal(err)
		}
		exposed := p.Exposed()
		slices.Sort(exposed)
		wanted := strings.Fields(want[0])
		slices.Sort(wanted)
		if !slices.Equal(exposed, wanted) || strings.Join(slices.Sorted(maps.Keys(p.callers())), " ") != want[1] {
			t.Errorf("%s: exposes %v and calls %v", targets, exposed, p.callers())
		}
	}
}

// Each service receives the flags that services share, with its own name in a path.
func TestFlagsOfASet(t *testing.T) {
	load := func(targets string, args ...string) (*Process, error) {
		return Load(table(), strings.Split(targets, ","), "run", args)
	}
	certs := []string{"--rpc-cert-file=/{service}.crt", "--watchfanout-addresses=a:1", "--rpc-address=b:1"}
	p, err := load("gateway,authn,registry", append(certs, "--kubeconfig=/{service}.kubeconfig", "--shared=x,y",
		"--of-authn=3")...)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range p.services {
		name := s.module.Name
		kubeconfig, _ := s.flags.GetString("kubeconfig")
		shared, _ := s.flags.GetStringSlice("shared")
		if kubeconfig != "/"+name+".kubeconfig" || !slices.Equal(shared, []string{"x", "y"}) {
			t.Errorf("%s has %s, %q", name, kubeconfig, shared)
		}
		if id := p.identity(name); id.CertFile != "/"+name+".crt" {
			t.Errorf("%s has the certificate %s", name, id.CertFile)
		}
	}
	if got := p.StopTimeout(); got < time.Minute {
		t.Errorf("the process may stop for %v, and the gateway for a minute", got)
	}
	for text, args := range map[string][]string{
		"--watchfanout-addresses or --xds-servers is required: gateway calls watchfanout, which is not among": {
			"--rpc-cert-file=/{service}.crt"},
		"want {service} in the path": {"--rpc-cert-file=/tls.crt",
			"--watchfanout-addresses=a:1"},
		"unknown flag: --of-watchfanout: it is a flag of watchfanout":    append(certs, "--of-watchfanout=1"),
		"--of-authn=x: not an integer":                                   append(certs, "--of-authn=x"),
		"--target=authn: this command runs gateway,authn,registry: want": append(certs, "--target=authn"),
		`--watchfanout-addresses "::": want host:port`:                   append(certs, "--watchfanout-addresses=::"),
		"--target=absent: no such service: want":                         nil,
	} {
		targets := "gateway,authn,registry"
		if args == nil {
			targets = "absent"
		}
		if _, err := load(targets, args...); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
