package snapshot

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"sigs.k8s.io/yaml"
)

// Member is a member of etcd in a data directory. Its fields are the settings of `watershed etcd`.
type Member struct {
	Dir     string `json:"data-dir"`
	Name    string `json:"name"`
	Listen  string `json:"listen-client-urls"`
	Peer    string `json:"listen-peer-urls"`
	Cluster string `json:"initial-cluster"`
}

// EtcdServersFile is the file of a data directory that has the servers of an etcd outside of the directory.
const EtcdServersFile = "etcd-servers"

// MembersOf returns the members of etcd in a data directory of `split` or `up`.
func MembersOf(dir string) ([]Member, error) {
	single := []Member{{Dir: filepath.Join(dir, "etcd")}}
	files, _ := fs.Glob(os.DirFS(dir), "config/etcd-*.yaml")
	if len(files) == 0 {
		return single, nil
	}
	var all []Member
	for _, f := range files {
		f = filepath.Join(dir, f)
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		var m Member
		if err := yaml.Unmarshal(text, &m); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		m.Dir = filepath.Join(dir, filepath.Base(m.Dir)) // the directory may be a copy, or may have moved
		all = append(all, m)
	}
	hasData := func(m Member) bool { return exists(m.Dir) }
	if len(all) > 1 && !slices.ContainsFunc(all, hasData) && hasData(single[0]) { // `up` has run since
		return single, nil
	}
	return all, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
