package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// A majority with data replaces the other members of etcd. Nothing is lost on the first start.
func TestLostMembers(t *testing.T) {
	const last = "etcd-2/member/wal/0.wal"
	for name, c := range map[string]struct {
		dirs []string
		want string
	}{
		"a first start":             {nil, "[]"},
		"a single member has data":  {[]string{"etcd-0/member/wal/0.wal"}, "[]"},
		"two members have data":     {[]string{"etcd-0/member/wal/0.wal", "etcd-1/member/wal/0.wal"}, "[etcd-2]"},
		"an interrupted join":       {[]string{"etcd-0/member/wal/0.wal", "etcd-1/member/snap", last}, "[etcd-1]"},
		"an empty mount point":      {[]string{"etcd-0", "etcd-1/member/wal/0.wal", last}, "[]"},
		"all three have their data": {[]string{"etcd-0/member/wal/0.wal", "etcd-1/member/wal/0.wal", last}, "[]"},
	} {
		l := &layout{dir: t.TempDir()}
		for _, d := range c.dirs {
			if err := os.MkdirAll(filepath.Join(l.dir, d), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if got := fmt.Sprint(l.lostMembers(3)); got != c.want {
			t.Errorf("%s: %s, not %s", name, got, c.want)
		}
	}
}

// The members of etcd keep their peer addresses over starts, because etcd keeps them in its data. A cluster that was
// started again had no quorum for good.
func TestMembersOfEtcdKeepTheirAddresses(t *testing.T) {
	dir, clusters := t.TempDir(), map[any]bool{}
	for range 2 {
		t.Run("start", func(t *testing.T) { // its end releases the directory
			for _, p := range plannedSplit(t, "--data-dir", dir, "--replicas=etcd=3") {
				if p.set == "etcd" {
					clusters[settingsIn(t, p.config)["initial-cluster"]] = true
				}
			}
			// The data of etcd-0 may be lost, and other members have their quorum.
			if err := os.MkdirAll(filepath.Join(dir, "etcd-1"), 0o700); err != nil {
				t.Fatal(err)
			}
			// A power loss may have emptied a file.
			if err := os.Truncate(filepath.Join(dir, "config", "etcd-0.yaml"), 0); err != nil {
				t.Fatal(err)
			}
		})
	}
	if len(clusters) != 1 {
		t.Errorf("the starts have the members %v", clusters)
	}
}

// A data directory with another number of members of etcd is refused: etcd would start empty, or have no quorum.
func TestTheNumberOfMembersOfEtcdMustNotChange(t *testing.T) {
	for name, test := range map[string]struct {
		dirs    []string
		cluster string
		members int
		refused string
	}{
		"a new directory":           {nil, "", 3, ""},
		"a single member again":     {[]string{"etcd"}, "", 1, ""},
		"three members again":       {[]string{"etcd-0"}, "a=b,c=d,e=f", 3, ""},
		"without the configuration": {[]string{"etcd-0"}, "", 3, "config/etcd-0.yaml does not have their addresses"},
		"to one, without addresses": {[]string{"etcd-0"}, "a=b", 1, "does not have their addresses"},
		"both, and a single member": {[]string{"etcd", "etcd-0"}, "a=b,c=d,e=f", 1, "move the data away"},
		"from a single member":      {[]string{"etcd"}, "", 3, "has an etcd of a single member, not of 3"},
		"to a single member":        {[]string{"etcd-0"}, "a=b,c=d,e=f", 1, "has an etcd of 3 members, not of 1"},
		"to five members":           {[]string{"etcd-0"}, "a=b,c=d,e=f", 5, "has an etcd of 3 members, not of 5"},
		"an interrupted restore":    {[]string{"etcd.restoring-20261128T153447Z"}, "", 1, "of an interrupted restore"},
		"a restore of one of three": {
			[]string{"etcd-0", "etcd-1.restoring-20261128T153447Z"}, "a=b,c=d,e=f", 3, "of an interrupted restore",
		},
		"a restore that changed nothing": {
			[]string{"etcd-0", "etcd-0.restoring-20261128T153447Z"}, "a=b,c=d,e=f", 3, "",
		},
		"of a directory moved aside": {[]string{"etcd-0.before-20261128T153447Z"}, "a=b,c=d,e=f", 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := &layout{dir: t.TempDir()}
			for _, d := range append(test.dirs, "config") {
				if err := os.Mkdir(filepath.Join(l.dir, d), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			if err := writeYAML(l.configFile("etcd-0"), map[string]any{"initial-cluster": test.cluster}); err != nil {
				t.Fatal(err)
			}
			err := l.checkEtcdMembers(test.members)
			if test.refused == "" && err != nil || test.refused != "" &&
				(err == nil || !strings.Contains(err.Error(), test.refused)) {
				t.Errorf("got %v, not %q", err, test.refused)
			}
		})
	}
}

// A start is refused if another process has the port of the gateways, which share it, or the address of a member of
// etcd, which cannot have another.
func TestPortsInUse(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.String("bind-address", "127.0.0.1", "")
	s := &splitRun{layout: &layout{dir: t.TempDir()}, flags: flags}
	check := func(want string) {
		t.Helper()
		err := s.checkPorts()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("got %v, not %q", err, want)
		}
	}
	check("")
	address := listener.Addr().(*net.TCPAddr)
	s.port = address.Port
	check("--secure-port")
	s.port = 0
	if err := errors.Join(os.Mkdir(filepath.Join(s.dir, "etcd-0"), 0o700),
		os.Mkdir(filepath.Join(s.dir, "config"), 0o700), writeYAML(s.configFile("etcd-0"), map[string]any{
			"initial-cluster": "etcd-0=https://127.0.0.1:0,etcd-1=https://" + address.String(),
		})); err != nil {
		t.Fatal(err)
	}
	check("a member of its etcd keeps its address")
}

// A start without --etcd-servers is refused after a start with it: the cluster would be empty.
func TestAnEtcdOutsideOfTheDirectoryIsNotForgotten(t *testing.T) {
	l := &layout{dir: t.TempDir()}
	servers := []string{"https://a:1", "https://b:1"}
	if err := errors.Join(l.checkEtcdServers("up", nil), l.checkEtcdServers("up", servers)); err != nil {
		t.Fatal(err)
	}
	l.recordEtcdServers(servers)
	err := l.checkEtcdServers("up", nil)
	if err == nil || !strings.Contains(err.Error(), "--etcd-servers is not set for up") ||
		!strings.Contains(err.Error(), "is in https://a:1,https://b:1") {
		t.Errorf("got %v", err)
	}
}
