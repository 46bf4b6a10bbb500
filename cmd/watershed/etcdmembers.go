package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// configFile returns the path of the configuration of a process of split.
func (l *layout) configFile(process string) string {
	return filepath.Join(l.dir, "config", process+".yaml")
}

// memberSettings are the settings of a member of etcd, in its configuration of the start before.
type memberSettings struct {
	Peer    string `json:"listen-peer-urls"`
	Cluster string `json:"initial-cluster"`
}

// memberBefore returns the settings of a member at the start before. They are empty for a new or a single member.
func (l *layout) memberBefore(n int) (m memberSettings, err error) {
	file := l.configFile(fmt.Sprintf("etcd-%d", n))
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err == nil {
		err = yaml.Unmarshal(text, &m)
	}
	if err != nil {
		return m, fmt.Errorf("%s: %w", file, err)
	}
	return m, nil
}

// etcdPeers returns the peer addresses that the members of etcd had at the start before. etcd keeps them in its data,
// so the members find each other only there. The address of a new member is empty.
func (l *layout) etcdPeers(members int) ([]string, error) {
	all := make([]string, members)
	for n := range all {
		m, err := l.memberBefore(n)
		if err != nil {
			return nil, err
		}
		all[n] = strings.TrimPrefix(m.Peer, "https://")
	}
	return all, nil
}

// checkEtcdMembers returns an error if the directory has the data of an etcd with another number of members. etcd would
// start empty, as if all objects were lost, or have no quorum.
func (l *layout) checkEtcdMembers(members int) error {
	const single, cluster = "etcd", "etcd-0"
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(l.dir, name))
		return err == nil
	}
	before := 0
	if has(cluster) {
		m, err := l.memberBefore(0)
		if err != nil {
			return err
		}
		before = strings.Count(m.Cluster, "=")
	}
	switch {
	case members == 1 && (has(single) || !has(cluster)):
		return nil
	case members > 1 && has(cluster) && (before == 0 || before == members):
		return nil
	case members > 1 && !has(cluster) && !has(single):
		return nil
	}
	found := "a single member"
	if has(cluster) {
		found = "several members"
		if before > 1 {
			found = fmt.Sprintf("%d members", before)
		}
	}
	return fmt.Errorf("--data-dir %q has an etcd of %s, not of %d (split --replicas etcd=N): start that number, or move "+
		"its etcd* and nats* away to begin with an empty etcd", l.dir, found, members)
}
