package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/config"
)

// migrateCommand prints a configuration for `up` from a cluster's kube-apiserver manifest, with the differences.
func migrateCommand(fs *pflag.FlagSet) func() error {
	from := fs.String(
		"from",
		"",
		"The static pod manifest of kube-apiserver, such as /etc/kubernetes/manifests/kube-apiserver.yaml.",
	)
	dataDir := fs.String(
		"data-dir",
		"/var/lib/watershed",
		"The data directory of Watershed, for the event log and its own certificates.",
	)
	return func() error { return migrate(*from, *dataDir) }
}

func migrate(from, dataDir string) error {
	if from == "" {
		return errors.New("--from is required: the path of kube-apiserver's static pod manifest")
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("--from %q: %w", from, err)
	}
	flags, err := flagsOf(text)
	if err != nil {
		return fmt.Errorf("--from %q: %w", from, err)
	}
	up := newUpFlags(pflag.NewFlagSet("watershed up", pflag.ContinueOnError))
	m := &migration{flags: up.FlagSet, settings: map[string]any{"data-dir": dataDir}}
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		m.convert(name, flags[name])
	}
	m.setDefaults(flags)
	if len(m.blocked) > 0 {
		return fmt.Errorf("the cluster of %s cannot be migrated:\n  %s", from, strings.Join(m.blocked, "\n  "))
	}
	for _, line := range m.omitted {
		fmt.Fprintln(os.Stderr, "watershed migrate: omitted:", line)
	}
	return m.print(os.Stdout, from)
}

// staticPod holds the fields of a manifest that determine a program's command line and paths.
type staticPod struct {
	Spec struct {
		Containers []container
		Volumes    []struct {
			Name     string
			HostPath *struct{ Path string }
		}
	}
}

type container struct {
	Name          string
	Command, Args []string
	VolumeMounts  []struct{ Name, MountPath, SubPath string }
}

// flagsOf returns the values of each flag of kube-apiserver in a static pod manifest, with the paths of the host.
func flagsOf(manifest []byte) (map[string][]string, error) {
	var pod staticPod
	if err := yaml.Unmarshal(manifest, &pod); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(pod.Spec.Containers, func(c container) bool {
		return c.Name == kubeAPIServerName || len(c.Command) > 0 && path.Base(c.Command[0]) == kubeAPIServerName
	})
	if i < 0 {
		return nil, errors.New("it has no container kube-apiserver")
	}
	c := pod.Spec.Containers[i]
	words := slices.Concat(c.Command, c.Args)
	if len(words) > 0 && path.Base(words[0]) == kubeAPIServerName {
		words = words[1:]
	}
	flags := map[string][]string{}
	for len(words) > 0 {
		name, value, err := nextFlag(&words)
		if err != nil {
			return nil, err
		}
		paths := strings.Split(value, ",") // --tls-sni-cert-key has two paths
		for i := range paths {
			paths[i] = pod.onHost(c, paths[i])
		}
		flags[name] = append(flags[name], strings.Join(paths, ","))
	}
	return flags, nil
}

// flagName matches valid flag names.
var flagName = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)

// nextFlag removes a flag and its value from the words of a command line, and returns them.
func nextFlag(words *[]string) (name, value string, err error) {
	word := (*words)[0]
	*words = (*words)[1:]
	name, value, hasValue := strings.Cut(strings.TrimLeft(word, "-"), "=")
	name = strings.ReplaceAll(name, "_", "-") // as kube-apiserver parses it
	if !strings.HasPrefix(word, "-") || !flagName.MatchString(name) {
		return "", "", fmt.Errorf(
			"argument %q is no flag: this reads kube-apiserver's own command line, not a shell's",
			word,
		)
	}
	switch {
	case hasValue:
	case len(*words) > 0 && !strings.HasPrefix((*words)[0], "-"):
		value, *words = (*words)[0], (*words)[1:]
	default:
		value = "true"
	}
	if strings.Contains(value, "$(") {
		return "", "", fmt.Errorf(
			"--%s %q: only the kubelet can expand this; write the value into a copy of the manifest",
			name,
			value,
		)
	}
	return name, value, nil
}

// onHost returns the host path of a path in the container.
func (p *staticPod) onHost(c container, value string) string {
	best := ""
	mounted := map[string]string{}
	for _, m := range c.VolumeMounts {
		for _, v := range p.Spec.Volumes {
			if v.Name == m.Name && v.HostPath != nil {
				mounted[m.MountPath] = path.Join(v.HostPath.Path, m.SubPath)
			}
		}
	}
	for mountPath := range mounted {
		if (value == mountPath || strings.HasPrefix(value, strings.TrimSuffix(mountPath, "/")+"/")) &&
			len(mountPath) > len(best) {
			best = mountPath
		}
	}
	if best == "" {
		return value
	}
	return path.Join(mounted[best], strings.TrimPrefix(value, best))
}

// migration is the result of converting kube-apiserver's flags.
type migration struct {
	flags    *pflag.FlagSet
	settings map[string]any
	// omitted lists unsupported flags, and blocked the flags that prevent the migration. differences lists the settings
	// that replace other defaults of kube-apiserver, and hints for the operator.
	omitted, blocked, differences []string
}

// convert adds a flag's values to the settings, or records the reason for omitting them.
func (m *migration) convert(name string, values []string) {
	line := fmt.Sprintf("--%s %q", name, strings.Join(values, ","))
	f := m.flags.Lookup(name)
	if f == nil {
		m.blocked = append(m.blocked, line+": kube-apiserver 1.36 has no such flag; is the manifest of another version?")
		return
	}
	if unsupported, ok := config.Unsupported(f); ok {
		if err := m.flags.Set(name, values[len(values)-1]); err != nil { // the value would change something
			m.omitted = append(m.omitted, line+": "+unsupported.Reason)
		}
		return
	}
	for _, v := range values {
		if err := m.flags.Set(name, v); err != nil {
			m.blocked = append(m.blocked, fmt.Sprintf("--%s %q: %v", name, v, err))
			return
		}
	}
	m.settings[name] = valueOf(f, values)
}

// valueOf returns the value of a flag as a configuration file represents it.
func valueOf(f *pflag.Flag, values []string) any {
	last := values[len(values)-1]
	if s, ok := f.Value.(pflag.SliceValue); ok {
		return s.GetSlice()
	}
	if len(values) > 1 && config.Accumulates(f) {
		return values
	}
	switch f.Value.Type() {
	case "bool":
		if b, err := strconv.ParseBool(last); err == nil {
			return b
		}
	case "int":
		if n, err := strconv.Atoi(last); err == nil {
			return n
		}
	}
	return last
}

// setDefaults sets the defaults of kube-apiserver that differ from those of `up`, and records other differences.
func (m *migration) setDefaults(flags map[string][]string) {
	for _, d := range upstreamDefaults {
		if flags[d.name] == nil && flags[cmp.Or(d.unless, d.name)] == nil {
			m.settings[d.name] = d.value
			m.differences = append(
				m.differences,
				fmt.Sprintf("--%s is not set: kube-apiserver's default is %v, and `up` has another", d.name, d.value),
			)
		}
	}
	for _, d := range []struct{ name, instead string }{
		{"client-ca-file", "the CA in the data directory signs client certificates"},
		{"tls-cert-file", "the CA in the data directory signs the serving certificate"},
		{"service-account-signing-key-file", "a key in the data directory signs tokens"},
		{"etcd-servers", "Watershed runs its own, empty etcd in the data directory"},
	} {
		if flags[d.name] == nil {
			m.differences = append(m.differences, fmt.Sprintf("--%s is not set: %s", d.name, d.instead))
		}
	}
	if modes, ok := m.settings["authorization-mode"].([]string); ok && slices.Contains(modes, alwaysAllow) {
		m.differences = append(
			m.differences,
			"--authorization-mode AlwaysAllow: anonymous requests are rejected, even if --authentication-config allows them",
		)
	}
	for _, name := range []string{"admission-control-config-file", "audit-webhook-config-file",
		"authentication-token-webhook-config-file", "authorization-config", "authorization-webhook-config-file",
		"egress-selector-config-file", "encryption-provider-config"} {
		if flags[name] != nil {
			m.differences = append(m.differences,
				fmt.Sprintf("the files that --%s names are not converted: their paths must be paths of the host", name))
		}
	}
}

// print writes the settings, with notes for the operator as comments.
func (m *migration) print(w io.Writer, from string) error {
	writeSection := func(head string, lines []string) {
		if len(lines) == 0 {
			return
		}
		fmt.Fprintf(w, "#\n# %s\n", head)
		for _, l := range lines {
			fmt.Fprintf(w, "#   %s\n", strings.ReplaceAll(l, "\n", " "))
		}
	}
	fmt.Fprintf(w, "# Settings for `watershed up --config FILE`, from %q.\n", from)
	fmt.Fprintf(w, "# Move the manifest out of its directory, wait until its port is free, and start Watershed.\n"+
		"# To go back, stop Watershed and move the manifest back.\n")
	writeSection("Differences:", m.differences)
	writeSection("Unsupported and omitted:", m.omitted)
	b, err := yaml.Marshal(m.settings)
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}
