package check

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/version"

	"watershed.dev/platform/process"
	"watershed.dev/services/registry/etcdstatus"
)

// PreInput is the state before an installation, that FindPre decides from. Machine or Host is set.
type PreInput struct {
	*Input
	Machine *Machine
	Host    *Host
}

// preChecks are the checks before an installation. Some need the etcd or the files of flags.
func preChecks(in *PreInput) []check[*PreInput] {
	all := []check[*PreInput]{
		{"ports", "the port is free", ports},
		{"data-dir", "the data directory can be used", dataDir},
		{"disks", "the disk has space", diskBefore},
		{"limits", "the process may open enough files", limits},
		{"clocks", "the clock is synchronized", clockBefore},
	}
	if in.Host != nil {
		all = []check[*PreInput]{{"kubernetes", "the cluster's version is supported", hostVersion}}
		if in.Host.Error == nil {
			all = append(all, []check[*PreInput]{
				{"clocks", "the clocks agree", hostClocks},
				{"permissions", "the user may create the objects of Watershed", permissions},
				{"namespace", "the namespace has no Deployment, StatefulSet or Service of Watershed", namespace},
			}...)
			if in.Etcd == nil {
				all = append(all, check[*PreInput]{"storage", "a StorageClass provides etcd's volumes", storage})
			}
		}
	}
	of := func(find func(*Input) []Finding) func(*PreInput) []Finding {
		return func(in *PreInput) []Finding { return find(in.Input) }
	}
	if in.Etcd != nil {
		all = append(all, check[*PreInput]{"etcd", "etcd has a quorum, space and no alarm", of(etcd)})
		if slices.ContainsFunc(in.Etcd.Members, hasSentCertificate) {
			const ok = "the CA of --etcd-cafile has signed etcd's certificate"
			all = append(all, check[*PreInput]{"ca", ok, of(authorities)})
		}
	}
	if len(in.Certificates) > 0 {
		all = append(all, check[*PreInput]{"certificates", "no certificate ends soon", of(ownCertificates)})
	}
	return all
}

// hasSentCertificate reports whether a member of etcd has sent its certificate, which the client verified or refused.
func hasSentCertificate(m etcdstatus.Member) bool {
	return strings.HasPrefix(m.Endpoint, "https://") && (m.Error == "" || ofTLS(m.Error))
}

// FindPre returns the findings of all checks before an installation.
func FindPre(in *PreInput) []Finding { return run(preChecks(in), in) }

// ReadPre reads everything that FindPre needs: of the cluster of --kubeconfig or --context, or of this machine. fs has
// the flags of `up`. An error means that the options are invalid.
func (o *Options) ReadPre(ctx context.Context, fs *pflag.FlagSet) (*PreInput, error) {
	in := &PreInput{Input: &Input{Now: time.Now()}}
	for _, c := range process.CertificatesOf(fs) {
		if !strings.HasPrefix(c.Flag, "--etcd-") { // readEtcd describes them
			in.Certificates = append(in.Certificates, c)
		}
	}
	in.Certificates = append(in.Certificates, keyErrors(fs)...)
	if len(o.Etcd.Servers) > 0 {
		if err := o.readEtcd(ctx, in.Input); err != nil {
			in.Etcd = &etcdstatus.Status{Servers: o.Etcd.Servers, Error: err.Error()}
		}
	}
	if o.Kubeconfig == "" && o.Context == "" {
		var err error
		in.Machine, err = o.readMachine(fs)
		return in, err
	}
	config, err := o.Config()
	if err == nil {
		in.Host, err = o.readHost(ctx, config)
	}
	return in, err
}

func ports(in *PreInput) []Finding {
	if err := in.Machine.AddressError; err != nil {
		return []Finding{fault(Error,
			"Stop the process that has the address, or set another --bind-address or --secure-port.",
			"--bind-address and --secure-port %s: %v", in.Machine.Address, err)}
	}
	return nil
}

func dataDir(in *PreInput) []Finding {
	if err := in.Machine.DirError; err != nil {
		return []Finding{fault(Error, "Choose another --data-dir, or run this as the user that will run Watershed.",
			"--data-dir %q: %v", in.Machine.Dir, err)}
	}
	return nil
}

// minimalSpace is the space in bytes that is enough for the first hours.
const minimalSpace = 1 << 30

func diskBefore(in *PreInput) []Finding {
	const gib = 1 << 30
	d, want := in.Machine.Disk, max(in.Machine.StoreBytes, minimalSpace)
	var level Level
	switch {
	case d.Path == "":
		return []Finding{fault(Skipped, "", "--data-dir %q has no disk that can be read", in.Machine.Dir)}
	case in.Machine.DiskError != nil:
		return []Finding{fault(Error, "Choose another --data-dir.", "the disk of --data-dir %q: %v", in.Machine.Dir,
			in.Machine.DiskError)}
	case d.FreeBytes < minimalSpace:
		level = Error
	case d.FreeBytes < want:
		level = Warning
	default:
		return nil
	}
	return []Finding{fault(level, "Free space, enlarge the disk, or choose another --data-dir.",
		"the disk of %s (%s) has %.1f GiB free: want %.1f GiB", d.Path, d.Flag, float64(d.FreeBytes)/gib,
		float64(want)/gib)}
}

// Limits of open files below which there is a finding. A connection of a client is a file.
const (
	filesWarning = 65536
	filesError   = 4096
)

func limits(in *PreInput) []Finding {
	level := Warning
	switch files := in.Machine.OpenFiles; {
	case files >= filesWarning:
		return nil
	case files < filesError:
		level = Error
	}
	return []Finding{fault(level, "Raise the hard limit: LimitNOFILE= of systemd, or ulimit -Hn.",
		"a process of this user may open %d files, and each connection is a file: want %d", in.Machine.OpenFiles,
		filesWarning)}
}

// oldestClock is before every release. A machine without a battery starts in 1970.
var oldestClock = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func clockBefore(in *PreInput) []Finding {
	const remedy = "Synchronize the clock with NTP, such as with chrony or systemd-timesyncd."
	if in.Now.Before(oldestClock) {
		return []Finding{fault(Error, remedy,
			"the clock of this machine is at %s: certificates and tokens would be invalid",
			in.Now.UTC().Format(time.RFC3339))}
	}
	if !in.Machine.ClockSynchronized {
		return []Finding{fault(Warning, remedy,
			"the kernel does not report that the clock of this machine is synchronized")}
	}
	return nil
}

// MinimalKubernetes is the oldest version of a hosting cluster. Its pre-releases are supported too, as in the chart: a
// provider may name its release v1.30.0-gke.100.
const MinimalKubernetes = "1.30.0"

func hostVersion(in *PreInput) []Finding {
	if err := in.Host.Error; err != nil {
		return []Finding{fault(Error, "Start the cluster, or correct --kubeconfig or --context.",
			"the cluster %s cannot be read: %v", in.Host.Server, err)}
	}
	v, err := version.ParseSemantic(in.Host.Version)
	if err != nil || v.LessThan(version.MustParseSemantic(MinimalKubernetes+"-0")) {
		return []Finding{fault(Error, "Upgrade the cluster.", "the cluster %s has the version %q: want %s or later",
			in.Host.Server, in.Host.Version, MinimalKubernetes)}
	}
	return nil
}

// serverSkew is the difference of clocks that the resolution of a response's date, of a second, explains.
const serverSkew = 1.0

func hostClocks(in *PreInput) (found []Finding) {
	add := func(of string, skew float64) {
		level := Warning
		switch {
		case skew <= skewWarning:
			return
		case skew > skewError:
			level = Error
		}
		found = append(found, fault(level, "Synchronize the clocks with NTP.", "the clock of %s by %.0f s", of, skew))
	}
	add("the cluster's API server differs from this machine's", math.Abs(in.Host.SkewSeconds)-serverSkew)
	for _, n := range in.Host.NodesAhead {
		add("the node "+n.Name+" is ahead of the cluster's API server", n.Seconds)
	}
	if err := in.Host.NodesError; err != nil {
		found = append(found, fault(Skipped, "", "the clocks of the nodes cannot be read: %v", err))
	}
	return found
}

func permissions(in *PreInput) []Finding {
	if err := in.Host.AccessError; err != nil {
		return []Finding{fault(Skipped, "", "the permissions cannot be read: %v", err)}
	}
	missing := slices.DeleteFunc(slices.Clone(in.Host.Missing), func(permission string) bool {
		return permission == "create namespaces" && in.Host.Exists ||
			permission == "create priorityclasses.scheduling.k8s.io" &&
				len(in.Host.PriorityClasses) == len(PriorityClassNames)
	})
	if len(missing) > 0 {
		return []Finding{fault(Error, "Use a kubeconfig whose user is an administrator, or grant the permissions.",
			"the user may not %s in the namespace %s", strings.Join(missing, "; "), in.Host.Namespace)}
	}
	return nil
}

func namespace(in *PreInput) (found []Finding) {
	h := in.Host
	if h.ObjectsError != nil {
		return []Finding{fault(Skipped, "", "the objects of the namespace %s cannot be read: %v", h.Namespace,
			h.ObjectsError)}
	}
	if h.Terminating {
		found = append(found, fault(Error, "Wait until the namespace has ended, or choose another with --namespace.",
			"the namespace %s is being deleted", h.Namespace))
	}
	if len(h.Existing) > 0 {
		found = append(found, fault(Error,
			"Choose another --namespace, delete the objects, or upgrade the release that has them.",
			"the namespace %s has %s", h.Namespace, strings.Join(h.Existing, ", ")))
	}
	if len(h.PriorityClasses) > 0 {
		found = append(found, fault(Warning, fmt.Sprintf("Install with --set 'omit={%s}', or delete them.",
			strings.Join(h.PriorityClasses, ",")), "the cluster has %s, and Helm adopts no objects",
			strings.Join(h.PriorityClasses, ", ")))
	}
	return found
}

func storage(in *PreInput) []Finding {
	h := in.Host
	switch {
	case h.StorageError != nil:
		return []Finding{fault(Skipped, "", "the StorageClasses cannot be read: %v", h.StorageError)}
	case h.StorageClass == "" && h.HasDefault:
	case h.StorageClass == "":
		return []Finding{fault(Error,
			"Mark a StorageClass as default, or set --storage-class and etcdStorage.className.",
			"the cluster has no default StorageClass for the volumes of etcd: %s",
			cmp.Or(strings.Join(h.StorageClasses, ", "), "none"))}
	case !slices.Contains(h.StorageClasses, h.StorageClass):
		return []Finding{fault(Error, "Create it, or choose another.", "--storage-class %s does not exist: %s",
			h.StorageClass, cmp.Or(strings.Join(h.StorageClasses, ", "), "none"))}
	}
	return nil
}
