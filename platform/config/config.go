// Package config fills a flag set from the command line, the environment, a file and the defaults, in this order.
//
// Flags declare every setting. The keys of the file and the environment variables derive from the flag names:
// WATERSHED_SECURE_PORT sets --secure-port. An unknown key or an invalid value is an error. The error names the key,
// the value and the file. The package does not reload the file, and it starts no goroutine.
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

// Load parses args into fs, and completes fs. If fs allows unknown flags, Load ignores unknown flags and keys.
func Load(fs *pflag.FlagSet, args []string) error {
	AddFlag(fs)
	if err := fs.Parse(args); err != nil {
		return FlagError(fs, err)
	}
	if !fs.ParseErrorsAllowlist.UnknownFlags {
		if err := NoArguments(fs.Args()); err != nil {
			return err
		}
	}
	return Complete(fs)
}

// AddFlag registers --config, unless fs has it.
func AddFlag(fs *pflag.FlagSet) {
	if fs.Lookup("config") == nil {
		fs.String("config", "", "A file that sets these flags. Its keys are the flag names without the dashes.")
	}
}

// NoArguments returns an error that names the first argument that is not a flag.
func NoArguments(args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unknown argument %q: want --name=value", args[0])
	}
	return nil
}

// Complete sets the flags that the parsed command line omits: from the environment, then from the file that --config
// names. The extension of the file selects YAML, JSON or TOML. A flag of pairs is a list in the file: ["name=value"].
func Complete(fs *pflag.FlagSet) error {
	strict := !fs.ParseErrorsAllowlist.UnknownFlags
	v := viper.NewWithOptions(viper.KeyDelimiter(delimiter))
	path, _ := fs.GetString("config")
	if !fs.Changed("config") {
		if env := os.Getenv(envPrefix + "_CONFIG"); env != "" {
			path = env
		}
	}
	if path != "" {
		v.SetConfigFile(path)
		err := v.ReadInConfig()
		if _, unsupported := errors.AsType[viper.UnsupportedConfigError](err); unsupported {
			err = errors.New("want a file whose name ends in .yaml, .json or .toml")
		}
		if err != nil {
			return fmt.Errorf("--config %q: %w", path, err)
		}
		for _, key := range v.AllKeys() {
			name, _, nested := strings.Cut(key, delimiter)
			if nested && fs.Lookup(name) != nil { // viper lowercases the keys of a map
				const text = `--config %q: key %q is a map: want a list of its pairs, ["name=value"]`
				return fmt.Errorf(text, path, name)
			}
			if strict && fs.Lookup(key) == nil {
				return fmt.Errorf("--config %q: unknown key %q%s", path, key, suggestion(fs, key, ""))
			}
		}
	}
	v.SetEnvPrefix(envPrefix)
	v.SetEnvKeyReplacer(strings.NewReplacer("-", "_"))
	v.AutomaticEnv()
	return fillUnset(fs, v, path)
}

// Environ returns the environment without the variables that set flags. A child process whose configuration file is
// complete needs none, and a variable overrides its file.
func Environ() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, envPrefix+"_") })
}

// notSettings are the flags that only the command line sets.
var notSettings = []string{"config", "help", "help-all"}

// FillDefaults sets each flag that is not set yet and that has a value in settings, by flag name.
func FillDefaults(fs *pflag.FlagSet, settings map[string]any) error {
	v := viper.NewWithOptions(viper.KeyDelimiter(delimiter))
	for name, value := range settings {
		v.Set(name, value)
	}
	return fillUnset(fs, v, "")
}

// fillUnset sets each flag that the command line omits and that v has a value for.
func fillUnset(fs *pflag.FlagSet, v *viper.Viper, path string) error {
	var errs []error
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Changed || slices.Contains(notSettings, f.Name) || !v.IsSet(f.Name) {
			return
		}
		if err := setFrom(fs, f, v); err != nil {
			source := "environment " + envPrefix + "_" + envName(f.Name)
			if os.Getenv(envPrefix+"_"+envName(f.Name)) == "" && v.InConfig(f.Name) {
				source = fmt.Sprintf("--config %q: key %q", path, f.Name)
			}
			errs = append(errs, fmt.Errorf("%s: value %q: %w", source, v.GetString(f.Name), valueError(f, err)))
		}
	})
	return errors.Join(errs...)
}

// envName returns a flag's name in the environment, without the prefix.
func envName(flag string) string { return strings.ToUpper(strings.ReplaceAll(flag, "-", "_")) }

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

// delimiter separates the names of a nested key. It is not the dot, because a name may contain dots.
const delimiter = "\x00"

// Accumulates returns true if each value of a repeated flag adds to the values before it. For other flags the last
// value wins.
func Accumulates(f *pflag.Flag) bool {
	_, slice := f.Value.(pflag.SliceValue)
	return slice || slices.Contains(repeatedTypes, f.Value.Type()) ||
		slices.Contains([]string{"mapStringBool", "stringSlice"}, f.Value.Type())
}

// FileValue returns the value of a flag as a configuration file represents it.
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
		if n := len(pairs); n > 0 && !strings.Contains(part, "=") { // the comma belongs to the previous value
			pairs[n-1] += "," + part
			continue
		}
		pairs = append(pairs, part)
	}
	return pairs
}

// repeatedTypes lists the flag types that accept one value at a time, because a value may contain commas:
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
