package check

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
	"watershed.dev/services/registry/etcdstatus"
)

// usable returns the input of a machine or a cluster without faults.
func usable(host bool) *PreInput {
	in := &PreInput{Input: &Input{Now: now, Certificates: []pki.Described{{Flag: "--client-ca-file", File: "/ca",
		NotBefore: now.AddDate(-1, 0, 0), NotAfter: now.AddDate(1, 0, 0)}}}}
	if host {
		in.Host = &Host{Server: "https://h", Version: "v1.30.0-gke.100", Namespace: "watershed",
			StorageClasses: []string{"fast"}, HasDefault: true}
		return in
	}
	in.Machine = &Machine{Address: "0.0.0.0:6443", Dir: ".watershed", OpenFiles: 1 << 20, ClockSynchronized: true,
		StoreBytes: 9 << 30, Disk: process.Disk{Flag: "--data-dir", Path: "/d", FreeBytes: 50e9, TotalBytes: 100e9}}
	return in
}

// Each fault before an installation has a finding of its check, with a level, a remedy and a link. No other check has a
// finding.
func TestEveryFaultBeforeAnInstallationIsFound(t *testing.T) {
	for name, c := range map[string]struct {
		check string
		level Level
		text  string
		host  bool
		plant func(*PreInput)
	}{
		"port in use": {"ports", Error, "0.0.0.0:6443: in use", false, func(in *PreInput) {
			in.Machine.AddressError = errors.New("in use")
		}},
		"directory of another user": {"data-dir", Error, `--data-dir ".watershed": not writable`, false,
			func(in *PreInput) { in.Machine.DirError = errors.New("not writable") }},
		"full disk": {"disks", Error, "has 0.5 GiB free: want 9.0 GiB", false, func(in *PreInput) {
			in.Machine.Disk.FreeBytes = 512 << 20
		}},
		"full disk without stores": {"disks", Error, "has 0.5 GiB free: want 1.0 GiB", false, func(in *PreInput) {
			in.Machine.Disk.FreeBytes, in.Machine.StoreBytes = 512<<20, 0
		}},
		"small disk": {"disks", Warning, "has 2.0 GiB free", false, func(in *PreInput) {
			in.Machine.Disk.FreeBytes = 2 << 30
		}},
		"unknown disk": {"disks", Error, "no such device", false, func(in *PreInput) {
			in.Machine.DiskError = errors.New("no such device")
		}},
		"few open files": {"limits", Warning, "may open 8192 files", false, func(in *PreInput) {
			in.Machine.OpenFiles = 8192
		}},
		"too few open files": {"limits", Error, "may open 1024 files", false, func(in *PreInput) {
			in.Machine.OpenFiles = 1024
		}},
		"clock of 1970": {"clocks", Error, "at 1970-01-01T00:00:00Z", false, func(in *PreInput) {
			in.Now, in.Certificates = time.Unix(0, 0), nil
		}},
		"clock without NTP": {"clocks", Warning, "does not report", false, func(in *PreInput) {
			in.Machine.ClockSynchronized = false
		}},
		"etcd without a quorum": {"etcd", Error, "has no quorum", false, func(in *PreInput) {
			in.Etcd = &etcdstatus.Status{Servers: []string{"https://e"}, Error: "deadline exceeded",
				Members: []etcdstatus.Member{{Endpoint: "https://e", Version: "3.6.1"}}}
		}},
		"stopped etcd": {"etcd", Error, "no member of etcd https://e responds", false, func(in *PreInput) {
			in.Etcd = &etcdstatus.Status{Servers: []string{"https://e"}, Error: "refused",
				Members: []etcdstatus.Member{{Endpoint: "https://e", Error: "refused"}}}
		}},
		"expired certificate": {"certificates", Error, "ended on 2026-04-30", false, func(in *PreInput) {
			in.Certificates = []pki.Described{{Flag: "--client-ca-file", File: "/ca", NotAfter: now.Add(-time.Hour)}}
		}},
		"stopped cluster": {"kubernetes", Error, "the cluster https://h cannot be read: refused", true,
			func(in *PreInput) { in.Host.Error = errors.New("refused") }},
		"old cluster": {"kubernetes", Error, `has the version "v1.29.9"`, true, func(in *PreInput) {
			in.Host.Version = "v1.29.9"
		}},
		"skewed cluster": {"clocks", Error, "API server differs from this machine's by 89 s", true, func(in *PreInput) {
			in.Host.SkewSeconds = -90
		}},
		"skewed node": {"clocks", Warning, "the node n is ahead", true, func(in *PreInput) {
			in.Host.NodesAhead = []NodeAhead{{"n", 3}}
		}},
		"missing permission": {"permissions", Error, "may not create deployments.apps; get secrets", true,
			func(in *PreInput) { in.Host.Missing = []string{"create deployments.apps", "get secrets"} }},
		"objects of another release": {"namespace", Error, "the namespace watershed has Service/etcd", true,
			func(in *PreInput) { in.Host.Existing = []string{"Service/etcd"} }},
		"PriorityClasses": {"namespace", Warning, "the cluster has PriorityClass/watershed", true, func(in *PreInput) {
			in.Host.PriorityClasses = []string{"PriorityClass/watershed"}
		}},
		"deleted namespace": {"namespace", Error, "is being deleted", true, func(in *PreInput) {
			in.Host.Terminating = true
		}},
		"no default StorageClass": {"storage", Error, "no default StorageClass for the volumes of etcd: fast", true,
			func(in *PreInput) { in.Host.HasDefault = false }},
		"unknown StorageClass": {"storage", Error, "--storage-class slow does not exist", true, func(in *PreInput) {
			in.Host.StorageClass = "slow"
		}},
	} {
		t.Run(name, func(t *testing.T) {
			in := usable(c.host)
			if all := FindPre(in); Worst(all) != OK || len(all) < 5 {
				t.Fatalf("without a fault: %+v", all)
			}
			c.plant(in)
			found := false
			for _, f := range FindPre(in) {
				switch {
				case f.Check != c.check && f.Level != OK:
					t.Errorf("another finding: %+v", f)
				case f.Check != c.check:
				case f.Level != c.level || !strings.Contains(f.Problem, c.text) || f.Remedy == "" ||
					f.Docs != page+c.check:
					t.Errorf("%+v, want %v %q", f, c.level, c.text)
				default:
					found = true
				}
			}
			if !found {
				t.Errorf("no finding of %s", c.check)
			}
		})
	}
}

// A state that cannot be read is skipped, and is no fault.
func TestAnUnreadStateIsSkipped(t *testing.T) {
	refused := errors.New("refused")
	for check, c := range map[string]struct {
		host  bool
		plant func(*PreInput)
	}{
		"disks":       {false, func(in *PreInput) { in.Machine.Disk = process.Disk{} }},
		"clocks":      {true, func(in *PreInput) { in.Host.NodesError = refused }},
		"permissions": {true, func(in *PreInput) { in.Host.AccessError = refused }},
		"namespace":   {true, func(in *PreInput) { in.Host.ObjectsError = refused }},
		"storage":     {true, func(in *PreInput) { in.Host.StorageError = refused }},
	} {
		in := usable(c.host)
		c.plant(in)
		for _, f := range FindPre(in) {
			if (f.Level == Skipped) != (f.Check == check) || f.Level > Skipped {
				t.Errorf("%s: %+v", check, f)
			}
		}
	}
}

// The CA of --etcd-cafile is checked only if etcd has sent its certificate.
func TestTheCAOfEtcdIsCheckedWithItsCertificate(t *testing.T) {
	for _, c := range []struct {
		member etcdstatus.Member
		want   []Level
	}{
		{etcdstatus.Member{Endpoint: "https://e", Version: "3.6.1", HasLeader: true}, []Level{OK}},
		{etcdstatus.Member{Endpoint: "https://e", Error: "x509: unknown authority"}, []Level{Error}},
		{etcdstatus.Member{Endpoint: "https://e", Error: "connection refused"}, nil},
		{etcdstatus.Member{Endpoint: "http://e", Version: "3.6.1", HasLeader: true}, nil},
	} {
		in := usable(false)
		in.Etcd = &etcdstatus.Status{Servers: []string{c.member.Endpoint}, Members: []etcdstatus.Member{c.member}}
		var got []Level
		for _, f := range FindPre(in) {
			if f.Check == "ca" {
				got = append(got, f.Level)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.member, got, c.want)
		}
	}
}

// An existing etcd and a selected StorageClass need no default StorageClass.
func TestADefaultStorageClassIsOptional(t *testing.T) {
	in := usable(true)
	in.Host.StorageClass, in.Host.HasDefault = "fast", false
	if all := FindPre(in); Worst(all) != OK {
		t.Errorf("%+v", all)
	}
	in.Host.StorageClass = ""
	in.Etcd = &etcdstatus.Status{Members: []etcdstatus.Member{{Version: "3.6.1", HasLeader: true}}}
	if all := FindPre(in); Worst(all) != OK ||
		slices.ContainsFunc(all, func(f Finding) bool { return f.Check == "storage" }) {
		t.Errorf("%+v", all)
	}
}

// The user need not create a namespace or PriorityClasses that exist.
func TestObjectsThatExistNeedNoPermission(t *testing.T) {
	in := usable(true)
	in.Host.Missing = []string{"create namespaces", "create priorityclasses.scheduling.k8s.io"}
	in.Host.Exists = true
	in.Host.PriorityClasses = []string{"PriorityClass/watershed", "PriorityClass/watershed-storage"}
	if all := FindPre(in); Worst(all) != Warning {
		t.Errorf("%+v", all)
	}
}

// A check of a directory changes nothing. It also works before the directory exists.
func TestACheckOfADirectoryChangesNothing(t *testing.T) {
	dir := t.TempDir()
	busy, foreign, empty := filepath.Join(dir, "busy"), filepath.Join(dir, "foreign"), filepath.Join(dir, "empty")
	for _, d := range []string{busy, foreign, empty} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	lock, err := process.Lock(busy)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	file := filepath.Join(foreign, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		busy:                           "in use by a running",
		foreign:                        "has other files",
		empty:                          "",
		filepath.Join(dir, "new", "a"): "",
		filepath.Join(file, "a"):       "not a directory",
	} {
		o := &Options{}
		o.DataDir = path
		m, err := o.readMachine(flagsOfUp(""))
		if err != nil || m.StoreBytes != 8<<30+5 {
			t.Fatalf("%+v, %v", m, err)
		}
		if got := m.DirError; (got == nil) != (want == "") || got != nil && !strings.Contains(got.Error(), want) {
			t.Errorf("%s: %v", path, got)
		}
		if want == "" && (m.Disk.TotalBytes == 0 || m.DiskError != nil || m.OpenFiles == 0 || m.AddressError != nil) {
			t.Errorf("%+v", m)
		}
	}
	info, err := os.Stat(empty)
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", info, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); err == nil {
		t.Error("the check creates a directory")
	}
}

// flagsOfUp returns the flags of up that readMachine reads.
func flagsOfUp(natsURL string) *pflag.FlagSet {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.String("bind-address", "127.0.0.1", "")
	fs.Int("secure-port", 0, "")
	fs.String("nats-url", natsURL, "")
	fs.Int64("log-max-bytes", 5, "")
	return fs
}

// A machine cannot be checked without the flags of up, which have its address.
func TestAMachineNeedsTheFlagsOfUp(t *testing.T) {
	if m, err := (&Options{}).readMachine(pflag.NewFlagSet("", pflag.ContinueOnError)); err == nil {
		t.Errorf("%+v", m)
	}
}

// The store of flags that name other servers takes no space of this machine.
func TestAForeignStoreTakesNoSpace(t *testing.T) {
	o := &Options{}
	o.Etcd.Servers = []string{"https://e:2379"}
	o.DataDir = t.TempDir()
	if m, err := o.readMachine(flagsOfUp("tls://n:4222")); err != nil || m.StoreBytes != 0 {
		t.Errorf("%+v, %v", m, err)
	}
}

// A key must belong to its certificate, and both flags must be set.
func TestAKeyBelongsToItsCertificate(t *testing.T) {
	dir := t.TempDir()
	ca, err := pki.OpenCA(dir, "ca", "test")
	if err != nil {
		t.Fatal(err)
	}
	leaf := func(name string) (cert, key string) {
		cert, key, _, err := ca.Leaf(pki.Leaf{Name: name, CommonName: name, Usage: pki.Server})
		if err != nil {
			t.Fatal(err)
		}
		return cert, key
	}
	cert, key := leaf("a")
	_, other := leaf("b")
	for want, files := range map[string][2]string{"": {cert, key}, "the other flag is not set": {cert, ""},
		"private key does not match": {cert, other}, "no such file": {cert, key + ".gone"}} {
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		fs.String("tls-cert-file", files[0], "")
		fs.String("tls-private-key-file", files[1], "")
		all := keyErrors(fs)
		if want == "" && len(all) > 0 || want != "" && (len(all) != 1 || !strings.Contains(all[0].Error, want)) {
			t.Errorf("%q: %+v", want, all)
		}
	}
}
