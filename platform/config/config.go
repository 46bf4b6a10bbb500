// Package config fills a flag set from, in this order, the command line, the environment, a file and the defaults.
//
// Flags are the one declaration of what can be configured; a file's keys and the environment's names are the flags'
// names (WATERSHED_SECURE_PORT for --secure-port). An unknown key or a value that does not parse is an error that
// names the key, the value and the file.
package config

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

const envPrefix = "WATERSHED"

// Load parses args into fs and fills what the command line left out from the environment, then from the file that
// --config names. The file is YAML, JSON or TOML, by its extension; what is given as pairs is a list there:
// ["name=value"].
func Load(fs *pflag.FlagSet, args []string) error {
	if fs.Lookup("config") == nil {
		fs.String("config", "", "A file of these same settings, a key a flag without its dashes.")
	}
	for _, a := range args {
		name, value, _ := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if why, ok := leftOut[name]; ok && strings.HasPrefix(a, "-") && fs.Lookup(name) == nil {
			return fmt.Errorf("--%s %q: %s", name, value, why)
		}
	}
	if err := fs.Parse(args); err != nil {
		return err
	}
	if extra := fs.Args(); len(extra) > 0 {
		return fmt.Errorf("unknown argument %q: settings are given as --name=value", extra[0])
	}
	v := viper.NewWithOptions(viper.KeyDelimiter(delimiter))
	path, _ := fs.GetString("config")
	if !fs.Changed("config") {
		if env := os.Getenv(envPrefix + "_CONFIG"); env != "" {
			path = env
		}
	}
	if path != "" {
		v.SetConfigFile(path)
		if err := v.ReadInConfig(); err != nil {
			return fmt.Errorf("--config %q: %w", path, err)
		}
		for _, key := range v.AllKeys() {
			name, _, nested := strings.Cut(key, delimiter)
			if nested && fs.Lookup(name) != nil { // viper has no respect for the case of its keys
				const text = `--config %q: key %q holds a map; give its pairs as a list: ["name=value"]`
				return fmt.Errorf(text, path, name)
			}
			if fs.Lookup(key) == nil {
				return fmt.Errorf("--config %q: unknown key %q%s", path, key, suggestion(fs, key))
			}
		}
	}
	v.SetEnvPrefix(envPrefix)
	v.SetEnvKeyReplacer(strings.NewReplacer("-", "_"))
	v.AutomaticEnv()
	return Apply(fs, v, path)
}

// leftOut are flags of kube-apiserver's that there is no equal of, and what to do instead.
var leftOut = map[string]string{
	"emulated-version":                            "only Kubernetes 1.36 itself is served; leave the flag out",
	"min-compatibility-version":                   "only Kubernetes 1.36 itself is served; leave the flag out",
	"emulation-forward-compatible":                "only Kubernetes 1.36 itself is served; leave the flag out",
	"runtime-config-emulation-forward-compatible": "only Kubernetes 1.36 itself is served; leave the flag out",
	"watch-cache":                                 "the watch tier is always there; leave the flag out",
	"watch-cache-sizes":                           "the watch tier keeps events by size: --watch-ring-bytes",
	"default-watch-cache-size":                    "the watch tier keeps events by size: --watch-ring-bytes",
	"apiserver-count":                             "the elected registry alone keeps the endpoints of the kubernetes Service; leave the flag out",
	"egress-selector-config-file": "there is no egress selector; nodes, pods and webhooks are " +
		"dialled from where the gateway, registry and admission run",
}

// Apply sets every flag that the command line left out and v has a value for.
func Apply(fs *pflag.FlagSet, v *viper.Viper, path string) error {
	var errs []error
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "config" || f.Name == "help" || !v.IsSet(f.Name) {
			return
		}
		if err := setFrom(fs, f, v); err != nil {
			where := "environment " + envPrefix + "_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
			if v.InConfig(f.Name) {
				where = fmt.Sprintf("--config %q: key %q", path, f.Name)
			}
			errs = append(errs, fmt.Errorf("%s: value %q: %w", where, v.GetString(f.Name), err))
		}
	})
	return errors.Join(errs...)
}

func setFrom(fs *pflag.FlagSet, f *pflag.Flag, v *viper.Viper) error {
	switch v.Get(f.Name).(type) {
	case []any, []string:
		if s, ok := f.Value.(pflag.SliceValue); ok {
			f.Changed = true
			return s.Replace(v.GetStringSlice(f.Name))
		}
		if f.Value.Type() == oneAtATime {
			return each(v.GetStringSlice(f.Name), func(s string) error { return fs.Set(f.Name, s) })
		}
		return fs.Set(f.Name, strings.Join(v.GetStringSlice(f.Name), ","))
	default:
		return fs.Set(f.Name, v.GetString(f.Name))
	}
}

// delimiter parts a nested key's names: a name may hold dots.
const delimiter = "\x00"

// oneAtATime is the type of flags that are given once for each pair, since a value may hold commas:
// --oidc-required-claim (k8s.io/component-base/cli/flag, NewMapStringStringNoSplit).
const oneAtATime = "mapStringString"

func each(all []string, set func(string) error) error {
	for _, s := range all {
		if err := set(s); err != nil {
			return err
		}
	}
	return nil
}

// suggestion names the flag that key was most likely meant to be.
func suggestion(fs *pflag.FlagSet, key string) string {
	best := ""
	fs.VisitAll(func(f *pflag.Flag) {
		if best == "" && (strings.EqualFold(strings.ReplaceAll(f.Name, "-", ""),
			strings.NewReplacer("-", "", "_", "").Replace(key)) || strings.Contains(f.Name, key)) {
			best = f.Name
		}
	})
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %q?)", best)
}
