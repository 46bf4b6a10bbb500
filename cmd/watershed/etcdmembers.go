package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/cmd/watershed/snapshot"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
)

// configFile returns the path of the configuration of a process of split.
func (l *layout) configFile(process string) string {
	return filepath.Join(l.dir, "config", process+".yaml")
}

// previousPeers returns the peer addresses in the configuration of etcd's members, by number, if any member has data. A
// member's data has these addresses, so a start cannot choose others. A single member has none.
func (l *layout) previousPeers() (peers []string, err error) {
	if _, several, _ := l.etcdData(); !several {
		return nil, nil
	}
	members, err := snapshot.MembersOf(l.dir)
	if err != nil {
		return nil, err
	}
	// a power loss during a start may have emptied a file
	i := max(0, slices.IndexFunc(members, func(m snapshot.Member) bool { return m.Cluster != "" }))
	for m := range strings.SplitSeq(members[i].Cluster, ",") {
		if _, peer, ok := strings.Cut(m, "="); ok {
			peers = append(peers, strings.TrimPrefix(peer, "https://"))
		}
	}
	return peers, nil
}

// etcdData reports whether the directory has the data of a single member of etcd, and of any of several members.
// restoring is restored data of an interrupted restore, whose member has no directory.
func (l *layout) etcdData() (single, several bool, restoring string) {
	files, _ := os.ReadDir(l.dir)
	for _, f := range files {
		single = single || f.Name() == "etcd"
		several = several || memberName.MatchString(f.Name())
		member, _, ok := strings.Cut(f.Name(), ".restoring-")
		if ok && strings.HasPrefix(member, "etcd") && !exists(filepath.Join(l.dir, member)) {
			restoring = f.Name()
		}
	}
	return single, several, restoring
}

var memberName = regexp.MustCompile(`^etcd-[0-9]+$`)

// checkEtcdMembers returns an error if the directory has the data of an etcd with another number of members. etcd would
// start empty, as if all objects were lost, or have no quorum.
func (l *layout) checkEtcdMembers(members int) error {
	single, several, restoring := l.etcdData()
	switch {
	case restoring != "": // empty members could form a quorum, or diverge from the restored members
		return fmt.Errorf("--data-dir %q has %s of an interrupted restore, whose member has no data: restore the "+
			"snapshot again, and then remove %[2]s", l.dir, restoring)
	case single && several:
		return fmt.Errorf("--data-dir %q has an etcd of a single member (etcd) and of several (etcd-0): move the data "+
			"away that is not used", l.dir)
	case members == 1 && single || !single && !several:
		return nil
	}
	found := "a single member"
	if several {
		previous, err := l.previousPeers()
		switch number := len(previous); {
		case err != nil:
			return err
		case number <= 1:
			return fmt.Errorf("--data-dir %q has an etcd of several members, and %s does not have their addresses: "+
				"restore that file, or move etcd* and nats* away, run this with --dry-run, and restore a snapshot",
				l.dir, l.configFile("etcd-0"))
		case number == members:
			return nil
		default:
			found = fmt.Sprintf("%d members", number)
		}
	}
	return fmt.Errorf("--data-dir %q has an etcd of %s, not of %d (split --replicas etcd=N): start that number, or "+
		"move its etcd* and nats* away to begin with an empty etcd", l.dir, found, members)
}

// etcdMember returns the name of the n-th of several members of etcd, which is also the name of its data directory.
func etcdMember(n int) string { return fmt.Sprintf("etcd-%d", n) }

// lostMembers returns the names of the members of etcd whose directory does not exist, while a majority has data. The
// majority can replace them. Without a majority, etcd itself refuses a member that it knows. An empty directory may be
// the mount point of a disk that is missing for a while. A directory without a write-ahead log is of a replacement that
// was interrupted.
func (l *layout) lostMembers(members int) (lost []string) {
	withData := 0
	for n := range members {
		member := filepath.Join(l.dir, etcdMember(n), "member")
		switch wal, _ := os.ReadDir(filepath.Join(member, "wal")); {
		case len(wal) > 0:
			withData++
		case exists(member) || !exists(filepath.Dir(member)):
			lost = append(lost, etcdMember(n))
		}
	}
	if 2*withData <= members {
		return nil
	}
	return lost
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// replaceTimeout bounds the replacement of a member. etcd accepts it 5 s after the other members have connected.
const replaceTimeout = time.Minute

// replaceMembers replaces and starts the lost members, each once the others accept it.
func (s *splitRun) replaceMembers(ctx context.Context) error {
	for _, p := range s.processes {
		if !slices.Contains(s.lost, p.name) {
			continue
		}
		s.show.starting(p.name, func() error { return errors.New("it has no data, and waits for the other members") })
		if err := s.replaceMember(ctx, p.name); err != nil {
			return err
		}
		if err := os.RemoveAll(filepath.Join(s.dir, p.name)); err != nil { // of an interrupted replacement
			return err
		}
		s.show.started("replaced: it has no data")
		p.start(s.spawn)
	}
	return nil
}

// replaceMember removes a member from etcd's cluster, and adds it again at the same peer address. It must then start
// without data, to receive all data: a member that has lost its data must not vote as before.
func (s *splitRun) replaceMember(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, replaceTimeout, errors.New("timeout"))
	defer cancel()
	id := s.pki.Identity("registry")
	e := inspect.Etcd{CertFile: id.CertFile, KeyFile: id.KeyFile, CAFile: id.CAFile}
	var peer string
	for n, address := range s.addresses["etcd"] {
		if etcdMember(n) == name {
			peer = "https://" + s.peers[n]
		}
		if !slices.Contains(s.lost, etcdMember(n)) {
			e.Servers = append(e.Servers, "https://"+address)
		}
	}
	conf, err := e.Config()
	if err != nil {
		return err
	}
	client, err := clientv3.New(conf)
	if err != nil {
		return err
	}
	defer client.Close()
	for {
		err := replace(ctx, client, peer)
		if err == nil {
			return nil
		}
		if lifecycle.Sleep(ctx, restartPause) != nil {
			return fmt.Errorf("%s has no data, and the other members do not replace it: %w: %w", name,
				context.Cause(ctx), err)
		}
	}
}

// replace replaces the member at a peer URL. It may be called again after an error.
func replace(ctx context.Context, client *clientv3.Client, peer string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	list, err := client.MemberList(ctx)
	if err != nil {
		return err
	}
	for _, m := range list.Members {
		switch {
		case !slices.Contains(m.PeerURLs, peer):
		case m.Name == "": // it was added before, and has not started
			return nil
		default:
			if _, err := client.MemberRemove(ctx, m.ID); err != nil {
				return err
			}
		}
	}
	_, err = client.MemberAdd(ctx, []string{peer})
	return err
}

// checkPorts returns an error if another process has the port of the gateways, or a peer address in etcd's data. The
// gateways share their port: without the check, two splits would each receive a part of the connections.
func (s *splitRun) checkPorts() error {
	bind, _ := s.flags.GetString("bind-address")
	if err := process.CheckFree(net.JoinHostPort(bind, strconv.Itoa(s.port))); err != nil {
		return fmt.Errorf("gateway: --bind-address %s --secure-port %d: %w", bind, s.port, err)
	}
	peers, err := s.previousPeers()
	for _, peer := range peers {
		if err := process.CheckFree(peer); err != nil {
			return fmt.Errorf("--data-dir %q: a member of its etcd keeps its address: %v; stop the process that has it", s.dir, err)
		}
	}
	return err
}

// checkEtcdServers returns an error if the cluster of the directory is in an etcd elsewhere, and servers names none.
// The start would begin an empty cluster with the same certificates.
func (l *layout) checkEtcdServers(command string, servers []string) error {
	path := filepath.Join(l.dir, snapshot.EtcdServersFile)
	previous, err := os.ReadFile(path)
	if len(servers) > 0 || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("--data-dir %q: %w", l.dir, err)
	}
	return fmt.Errorf("--etcd-servers is not set for %s: the cluster of --data-dir %q is in %s: start with that "+
		"flag (up), or remove %s to use the etcd of this directory", command, l.dir,
		strings.TrimSpace(string(previous)), path)
}

// recordEtcdServers records the servers of an etcd outside of this directory, for checkEtcdServers.
func (l *layout) recordEtcdServers(servers []string) {
	if len(servers) == 0 {
		return
	}
	path := filepath.Join(l.dir, snapshot.EtcdServersFile)
	if err := pki.WriteFile(path, []byte(strings.Join(servers, ",")+"\n"), 0o600); err != nil {
		slog.Warn("The servers of etcd are not recorded", "error", err)
	}
}
