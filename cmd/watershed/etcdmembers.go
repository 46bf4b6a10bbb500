package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"watershed.dev/cmd/watershed/snapshot"
)

// configFile returns the path of the configuration of a process of split.
func (l *layout) configFile(process string) string {
	return filepath.Join(l.dir, "config", process+".yaml")
}

// previousPeers returns the peer addresses that the members of etcd had at the previous start, by number. etcd stores
// them in its data, and its members connect only to them. A single member has none.
func (l *layout) previousPeers() (peers []string, err error) {
	members, err := snapshot.MembersOf(l.dir)
	if err != nil {
		return nil, err
	}
	for m := range strings.SplitSeq(members[0].Cluster, ",") {
		if _, peer, ok := strings.Cut(m, "="); ok {
			peers = append(peers, strings.TrimPrefix(peer, "https://"))
		}
	}
	return peers, nil
}

// checkEtcdMembers returns an error if the directory has the data of an etcd with another number of members. etcd would
// start empty, as if all objects were lost, or have no quorum.
func (l *layout) checkEtcdMembers(members int) error {
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(l.dir, name))
		return err == nil
	}
	single, several := has("etcd"), has("etcd-0")
	if members == 1 && single || !single && !several {
		return nil
	}
	found := "a single member"
	if several {
		previous, err := l.previousPeers()
		if err != nil {
			return err
		}
		number := len(previous)
		if members > 1 && (number == 0 || number == members) {
			return nil
		}
		if found = "several members"; number > 1 {
			found = fmt.Sprintf("%d members", number)
		}
	}
	return fmt.Errorf("--data-dir %q has an etcd of %s, not of %d (split --replicas etcd=N): start that number, or "+
		"move its etcd* and nats* away to begin with an empty etcd", l.dir, found, members)
}
