package storage

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path"
	"slices"
	"strings"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime/schema"
	serveroptions "k8s.io/apiserver/pkg/server/options"

	"watershed.dev/platform/eventlog"
)

// maxOtherEtcds bounds the etcds of --etcd-servers-overrides. A replica of the watch tier has a NATS subscription for
// each log, and cmd/embedded/accounts.conf allows 8.
const maxOtherEtcds = 7

// inMain are the resources that authn, authz, admission and the registry decide by. They compare the revisions of these
// resources with each other, so the same etcd must have them all (apiclient.Cluster.TrackAge, objects.Namespaces).
var inMain = []schema.GroupResource{
	{Resource: "limitranges"},
	{Resource: "namespaces"},
	{Resource: "persistentvolumes"},
	{Resource: "pods"},
	{Resource: "resourcequotas"},
	{Resource: "secrets"},
	{Resource: "serviceaccounts"},
	{Group: "admissionregistration.k8s.io", Resource: "*"},
	{Group: "certificates.k8s.io", Resource: "podcertificaterequests"},
	{Group: "rbac.authorization.k8s.io", Resource: "*"},
	{Group: "resource.k8s.io", Resource: "resourceslices"},
	{Group: "storage.k8s.io", Resource: "volumeattachments"},
}

// overridesFlag is the name of the flag that Options.Overrides holds.
const overridesFlag = "--etcd-servers-overrides"

// validateOverrides returns an error that names an override which Watershed does not support.
func (o *Options) validateOverrides() error {
	overrides, err := serveroptions.ParseEtcdServersOverrides(o.Overrides)
	if err != nil {
		return fmt.Errorf("%w: %q", err, o.Overrides)
	}
	for _, override := range overrides {
		gr := override.GroupResource
		if slices.ContainsFunc(inMain, func(m schema.GroupResource) bool {
			return m.Group == gr.Group && (m == gr || m.Resource == "*" || gr.Resource == "*")
		}) {
			return fmt.Errorf("%s %q: the main etcd must have %s, because access decisions depend on its revision; "+
				"remove the override", overridesFlag, flagValue(gr), gr)
		}
	}
	if ids := o.otherLogs(overrides); len(ids) > maxOtherEtcds {
		return fmt.Errorf("%s names %d etcds; the limit is %d", overridesFlag, len(ids), maxOtherEtcds)
	}
	return nil
}

// flagValue returns a resource as --etcd-servers-overrides names it.
func flagValue(gr schema.GroupResource) string { return gr.Group + "/" + gr.Resource }

// Logs returns the number of event logs: the log of the main etcd, and a log for each other etcd.
func (o *Options) Logs() (int, error) {
	overrides, err := serveroptions.ParseEtcdServersOverrides(o.Overrides)
	return 1 + len(o.otherLogs(overrides)), err
}

// otherLogs returns the logs of the etcds that are not the main etcd, in the order of the flag.
func (o *Options) otherLogs(overrides []serveroptions.EtcdServerOverride) (ids []eventlog.LogID) {
	for _, override := range overrides {
		if id := o.logOf(override.Servers); id != eventlog.Main && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// logOf returns the log of the etcd with the servers, in any order. As in kube-apiserver, equal servers are the same
// etcd.
func (o *Options) logOf(servers []string) eventlog.LogID {
	key := serversKey(servers)
	if key == serversKey(o.Servers) {
		return eventlog.Main
	}
	sum := sha256.Sum256([]byte(key))
	return eventlog.LogID(hex.EncodeToString(sum[:5]))
}

func serversKey(servers []string) string {
	return strings.Join(slices.Sorted(slices.Values(servers)), ";")
}

// openEtcds connects to the etcds of all overrides.
func (s *Storage) openEtcds(connect func([]string) (*etcdkubernetes.Client, error)) error {
	overrides, err := serveroptions.ParseEtcdServersOverrides(s.options.Overrides)
	if err != nil {
		return err
	}
	for _, override := range overrides {
		if s.etcdOf(override.Servers) != nil {
			continue
		}
		client, err := connect(override.Servers)
		if err != nil {
			return fmt.Errorf("%s %q: %w", overridesFlag, flagValue(override.GroupResource), err)
		}
		s.addEtcd(client, override.Servers)
	}
	return nil
}

// addEtcd adds a client to the etcds.
func (s *Storage) addEtcd(client *etcdkubernetes.Client, servers []string) *Etcd {
	client.Kubernetes = &cachingClient{client.Kubernetes, client.KV, s}
	e := &Etcd{
		Client:  client,
		Log:     s.options.logOf(servers),
		Servers: servers,
		prefix:  strings.TrimSuffix(path.Join("/", s.options.Prefix), "/") + "/",
	}
	s.etcds = append(s.etcds, e)
	return e
}

// etcdOf returns the etcd with the servers, or nil.
func (s *Storage) etcdOf(servers []string) *Etcd {
	e, _ := s.EtcdByLog(s.options.logOf(servers))
	return e
}

// Etcds returns all etcds, the main etcd first.
func (s *Storage) Etcds() []*Etcd { return s.etcds }

// EtcdByLog returns the etcd of an event log.
func (s *Storage) EtcdByLog(id eventlog.LogID) (*Etcd, bool) {
	i := slices.IndexFunc(s.etcds, func(e *Etcd) bool { return e.Log == id })
	if i < 0 {
		return nil, false
	}
	return s.etcds[i], true
}

// CheckOverrides returns an error if an override has no effect. Either no built-in resource is stored under its name,
// or the main etcd always has the resource. The latter is true for CustomResourceDefinitions and APIServices.
// The caller calls it once all built-in resources are registered.
func (s *Storage) CheckOverrides() error {
	overrides, err := serveroptions.ParseEtcdServersOverrides(s.options.Overrides)
	if err != nil {
		return err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, override := range overrides {
		gr, found := override.GroupResource, false
		for _, st := range s.byName {
			found = found || st.Etcd.Log == s.options.logOf(override.Servers) && st.GroupResource.Group == gr.Group &&
				(gr.Resource == "*" || st.GroupResource == gr)
		}
		if !found {
			return fmt.Errorf("%s %q: no served resource is stored under this name in an etcd of its own; correct or "+
				"remove the override", overridesFlag, flagValue(gr))
		}
	}
	return nil
}
