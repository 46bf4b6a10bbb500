package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"watershed.dev/platform/rpc"
)

// A service depends on exactly the services whose methods it may call (rpc.AllowedClients).
func TestModulesDependOnAllowedServices(t *testing.T) {
	// offered names the service of a contract, if their names differ.
	offered := map[string]string{"/watershed.watchfanout.v1.InternalWatch": "registry"}
	allowed := map[string][]string{}
	for method, callers := range rpc.AllowedClients {
		contract := method[:strings.LastIndexByte(method, '/')]
		if !strings.HasPrefix(contract, "/watershed.") || contract == "/watershed.process.v1.Processes" {
			continue // a method of the xDS server, which is not a module, or of every process
		}
		callee := offered[contract]
		if callee == "" {
			callee = strings.Split(contract, ".")[1]
		}
		for _, c := range callers {
			if !slices.Contains(allowed[c], callee) {
				allowed[c] = append(allowed[c], callee)
			}
		}
		if modules.Get(callee) == nil {
			t.Errorf("%s is offered by no module", method)
		}
	}
	for _, m := range modules {
		calls, may := slices.Sorted(slices.Values(m.DependsOn)), slices.Sorted(slices.Values(allowed[m.Name]))
		if !slices.Equal(calls, may) {
			t.Errorf("%s calls %v, and may call %v", m.Name, calls, may)
		}
		delete(allowed, m.Name)
	}
	for name := range allowed {
		t.Errorf("%q may call and is no module", name)
	}
}

// Every placement runs every service exactly once.
func TestPlacementsHaveEveryService(t *testing.T) {
	want := slices.Sorted(slices.Values(modules.Names()))
	for name, sets := range placements {
		var all []string
		for _, s := range sets {
			all = append(all, s.targets...)
		}
		if slices.Sort(all); !slices.Equal(all, want) {
			t.Errorf("%s runs %v", name, all)
		}
	}
}

// The command check has the flags of `up` if its flag --pre is set, in any form.
func TestCheckHasTheFlagsOfUpBeforeAnInstallation(t *testing.T) {
	for _, x := range []struct {
		args []string
		env  string
		want bool
	}{
		{[]string{"check", "--pre"}, "", true},
		{[]string{"check", "-o", "json", "--pre=true", "--secure-port", "1"}, "", true},
		{[]string{"check"}, "true", true},
		{[]string{"check", "--pre=false"}, "", false},
		{[]string{"check", "--deep"}, "", false},
	} {
		t.Setenv("WATERSHED_PRE", x.env)
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		checkCommand(x.args)(fs)
		if got := fs.Lookup("bind-address") != nil; got != x.want {
			t.Errorf("%q, WATERSHED_PRE=%s: %v", x.args, x.env, got)
		}
	}
}

// AlwaysAllow disables anonymous requests. It does not set the flag beside --authentication-config, because authn
// refuses to start with the flag if the file has an `anonymous` section.
func TestAlwaysAllowDisablesAnonymousRequests(t *testing.T) {
	for _, x := range []struct {
		args    []string
		changed bool
	}{
		{[]string{"--authorization-mode=RBAC"}, false},
		{[]string{"--authorization-mode=RBAC,AlwaysAllow"}, true},
		{[]string{"--authorization-mode=AlwaysAllow", "--authentication-config=/a.yaml"}, false},
	} {
		up := newUpFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
		if err := up.Parse(x.args); err != nil {
			t.Fatal(err)
		}
		disableAnonymous(up.FlagSet)
		f := up.Lookup("anonymous-auth")
		if f.Changed != x.changed || f.Value.String() == "true" == x.changed {
			t.Errorf("%q: --anonymous-auth=%s, set: %v", x.args, f.Value, f.Changed)
		}
	}
}

// A start without the API of flow control is rejected, as by kube-apiserver. A key of higher precedence excuses it.
func TestFlowControlRequiresItsAPI(t *testing.T) {
	const v1 = "flowcontrol.apiserver.k8s.io/v1"
	for _, x := range []struct{ served, conflict string }{
		{"", ""},
		{v1 + "=false", v1},
		{"api/ga=false", "api/ga"},
		{"api/all=false,api/v1=true", "api/all"},
		{v1 + "=true,api/all=false", ""},
		{"api/ga=true,api/all=false", ""},
		{v1 + "=false,api/all=true", v1},
		{"batch/v1=false", ""},
	} {
		for _, fairness := range []bool{true, false} {
			up := newUpFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
			args := []string{fmt.Sprintf("--enable-priority-and-fairness=%t", fairness)}
			if x.served != "" {
				args = append(args, "--runtime-config="+x.served)
			}
			if err := up.Parse(args); err != nil {
				t.Fatal(err)
			}
			want := ""
			if fairness && x.conflict != "" {
				want = "--runtime-config=" + x.conflict + "=false conflicts with --enable-priority-and-fairness=true"
			}
			if err := checkFairness(up.FlagSet); err == nil && want != "" || err != nil && err.Error() != want {
				t.Errorf("%q: %v, not %q", args, err, want)
			}
		}
	}
}
