package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
)

func flags() (*pflag.FlagSet, *int, *[]string) {
	fs := pflag.NewFlagSet("t", pflag.ContinueOnError)
	return fs, fs.Int("secure-port", 6443, ""), fs.StringSlice("etcd-servers", nil, "")
}

func file(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPrecedence(t *testing.T) {
	path := file(t, "secure-port: 1\netcd-servers: [a, b]\n")
	for name, c := range map[string]struct {
		args []string
		env  string
		want int
	}{
		"default":                 {nil, "", 6443},
		"file over default":       {[]string{"--config", path}, "", 1},
		"environment over file":   {[]string{"--config", path}, "2", 2},
		"flag over environment":   {[]string{"--config", path, "--secure-port=3"}, "2", 3},
		"environment, no file":    {nil, "2", 2},
		"flag over all, no files": {[]string{"--secure-port", "3"}, "2", 3},
	} {
		t.Run(name, func(t *testing.T) {
			if c.env != "" {
				t.Setenv("WATERSHED_SECURE_PORT", c.env)
			}
			fs, port, _ := flags()
			if err := Load(fs, c.args); err != nil || *port != c.want {
				t.Errorf("port %d, want %d (%v)", *port, c.want, err)
			}
		})
	}
}

func TestListsComeFromFiles(t *testing.T) {
	fs, _, servers := flags()
	if err := Load(fs, []string{"--config", file(t, "etcd-servers: [a, b]\n")}); err != nil ||
		strings.Join(*servers, "+") != "a+b" {
		t.Errorf("%v (%v)", *servers, err)
	}
}

func TestErrorsNameTheValue(t *testing.T) {
	for text, wants := range map[string][]string{
		"secureport: 1\n":     {`"secureport"`, `did you mean "secure-port"`},
		"secure-port: many\n": {`"secure-port"`, `"many"`},
		"a: [\n":              {"c.yaml"},
	} {
		fs, _, _ := flags()
		err := Load(fs, []string{"--config", file(t, text)})
		if err == nil {
			t.Errorf("%q is taken", text)
			continue
		}
		for _, w := range wants {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q: no %s in %v", text, w, err)
			}
		}
	}
	t.Setenv("WATERSHED_SECURE_PORT", "many")
	fs, _, _ := flags()
	err := Load(fs, []string{"--config", file(t, "secure-port: 1\n")})
	if err == nil || !strings.HasPrefix(err.Error(), "environment WATERSHED_SECURE_PORT: ") {
		t.Errorf("the environment has precedence: %v", err)
	}
	t.Setenv("WATERSHED_SECURE_PORT", "")
	fs, _, _ = flags()
	if err := Load(fs, []string{"stray"}); err == nil || !strings.Contains(err.Error(), "stray") {
		t.Errorf("got %v", err)
	}
}

// A flag that repeats for each pair accepts a list in a file, because a value may contain commas (features F10).
func TestPairsThatMayHoldCommasComeFromFiles(t *testing.T) {
	for text, bad := range map[string]bool{
		"oidc-required-claim: [\"A=b,c\", d=e]\n":   false,
		"oidc-required-claim: {A: \"b,c\", d: e}\n": true,
	} {
		file := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
		claims := map[string]string{}
		fs.Var(cliflag.NewMapStringStringNoSplit(&claims), "oidc-required-claim", "")
		err := Load(fs, []string{"--config", file})
		if bad {
			if err == nil || !strings.Contains(err.Error(), `"oidc-required-claim" is a map`) {
				t.Errorf("%s: %v", text, err)
			}
			continue
		}
		if err != nil || len(claims) != 2 || claims["A"] != "b,c" || claims["d"] != "e" {
			t.Errorf("%s: %v, %v", text, claims, err)
		}
	}
}

// Unsupported flags accept the values that change nothing. Other values fail the start from every source, with the
// reason and the advice.
func TestUnsupportedFlags(t *testing.T) {
	for _, c := range []struct{ name, value, fails string }{
		{"emulated-version", "1.36", ""},
		{"emulated-version", "1.35", "only Kubernetes 1.36 itself is served; leave the flag out"},
		{"log-text-split-stream", "true", "logs are written as they come"},
		{"log-text-split-stream", "0", ""},
		{"log-text-split-stream", "maybe", "not true or false"},
		{"watch-cache-sizes", "pods#10", ""},
		{"watch-cache", "true", ""},
		{"watch-cache", "false", "the watch cache is always enabled"},
		{"storage-backend", "etcd3", ""},
		{"storage-backend", "etcd2", "etcd3 is the only storage backend"},
		{"storage-initialization-timeout", "90s", ""},
		{"storage-initialization-timeout", "90", "not a duration"},
		{"debug-socket-path", "", ""},
		{"debug-socket-path", "/s", "--debug-address"},
	} {
		fs, _, _ := flags()
		AddUnsupported(fs)
		given := Load(fs, []string{"--" + c.name, c.value})
		if fs.Lookup(c.name).NoOptDefVal != "" { // a bool
			given = Load(fs, []string{"--" + c.name + "=" + c.value})
		}
		fs, _, _ = flags()
		AddUnsupported(fs)
		inFile := Load(fs, []string{"--config", file(t, c.name+": \""+c.value+"\"\n")})
		for _, err := range []error{given, inFile} {
			switch {
			case c.fails == "" && err == nil:
			case c.fails == "" || err == nil || !strings.Contains(err.Error(), c.fails) ||
				!strings.Contains(err.Error(), c.name):
				t.Errorf("%s=%s: %v", c.name, c.value, err)
			}
		}
	}
	fs, _, _ := flags()
	AddUnsupported(fs)
	if _, ok := Unsupported(fs.Lookup("secure-port")); ok {
		t.Error("a flag that is offered is unsupported")
	}
}

// A child process whose configuration file is complete gets no variable that sets a flag.
func TestEnvironHasNoSettings(t *testing.T) {
	t.Setenv("WATERSHED_DATA_DIR", "/d")
	t.Setenv("OTHER", "x")
	all := Environ()
	if slices.Contains(all, "WATERSHED_DATA_DIR=/d") || !slices.Contains(all, "OTHER=x") {
		t.Errorf("got %q", all)
	}
}
