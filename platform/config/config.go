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
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	cliflag "k8s.io/component-base/cli/flag"
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
		if unsupported, ok := Unsupported(name); ok && strings.HasPrefix(a, "-") && fs.Lookup(name) == nil {
			return fmt.Errorf("--%s %q: %w", name, value, unsupported)
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
			if unsupported, ok := Unsupported(key); ok && fs.Lookup(key) == nil {
				return fmt.Errorf("--config %q: key %q: %w", path, key, unsupported)
			}
			if fs.Lookup(key) == nil {
				return fmt.Errorf("--config %q: unknown key %q%s", path, key, suggestion(fs, key))
			}
		}
	}
	v.SetEnvPrefix(envPrefix)
	v.SetEnvKeyReplacer(strings.NewReplacer("-", "_"))
	v.AutomaticEnv()
	return FillUnset(fs, v, path)
}

// FillUnset sets every flag that the command line left out and v has a value for.
func FillUnset(fs *pflag.FlagSet, v *viper.Viper, path string) error {
	var errs []error
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "config" || f.Name == "help" || !v.IsSet(f.Name) {
			return
		}
		if err := setFrom(fs, f, v); err != nil {
			source := "environment " + envPrefix + "_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
			if v.InConfig(f.Name) {
				source = fmt.Sprintf("--config %q: key %q", path, f.Name)
			}
			errs = append(errs, fmt.Errorf("%s: value %q: %w", source, v.GetString(f.Name), err))
		}
	})
	return errors.Join(errs...)
}

func setFrom(fs *pflag.FlagSet, flag *pflag.Flag, v *viper.Viper) error {
	switch v.Get(flag.Name).(type) {
	case []any, []string:
		if s, ok := flag.Value.(pflag.SliceValue); ok {
			flag.Changed = true
			return s.Replace(v.GetStringSlice(flag.Name))
		}
		if slices.Contains(repeatedTypes, flag.Value.Type()) {
			return setEach(v.GetStringSlice(flag.Name), func(s string) error { return fs.Set(flag.Name, s) })
		}
		return fs.Set(flag.Name, strings.Join(v.GetStringSlice(flag.Name), ","))
	default:
		return fs.Set(flag.Name, v.GetString(flag.Name))
	}
}

// delimiter parts a nested key's names: a name may hold dots.
const delimiter = "\x00"

// Accumulates says of a flag whether each value that it is given adds to those before; of any other the last one counts.
func Accumulates(f *pflag.Flag) bool {
	_, slice := f.Value.(pflag.SliceValue)
	return slice || slices.Contains(repeatedTypes, f.Value.Type()) ||
		slices.Contains([]string{"mapStringBool", "stringSlice"}, f.Value.Type())
}

// FileValue is what a flag has been told, as a file of settings says it.
func FileValue(f *pflag.Flag) any {
	switch v := f.Value.(type) {
	case pflag.SliceValue:
		return v.GetSlice()
	case *cliflag.NamedCertKeyArray:
		return strings.Split(strings.Trim(v.String(), "[]"), ";")
	}
	text := f.Value.String()
	if !slices.Contains(repeatedTypes, f.Value.Type()) {
		return text
	}
	pairs := []string{}
	for _, part := range strings.Split(text, ",") {
		if n := len(pairs); n > 0 && !strings.Contains(part, "=") { // a comma of the value before
			pairs[n-1] += "," + part
			continue
		}
		pairs = append(pairs, part)
	}
	return pairs
}

// repeatedTypes are the types of flags that are given once for each value, since a value may hold commas:
// --oidc-required-claim and --tls-sni-cert-key (k8s.io/component-base/cli/flag, NewMapStringStringNoSplit and
// NamedCertKeyArray).
var repeatedTypes = []string{"mapStringString", "namedCertKey"}

func setEach(all []string, set func(string) error) error {
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
