package registry

import (
	"context"
	"maps"
	"path"
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/controllers"
	"watershed.dev/services/registry/discovery"
)

// servedByAll returns the CRDs that every live gateway, of any host, serves and that are not established, by name, with
// the lowest of the gateways' revisions. It returns no CRD while a kube-apiserver is live, because it does not report.
func (s *Service) servedByAll(ctx context.Context) (map[string]int64, error) {
	store := s.resources.Storage
	read := func(prefix string) clientv3.Op { return clientv3.OpGet(prefix, clientv3.WithPrefix()) }
	resp, err := store.Client.Client.Txn(ctx).Then(
		read(store.OwnKey(discovery.GatewaysPrefix)),
		read(store.OwnKey(discovery.ReportsPrefix)),
		read(store.Prefix()+controllers.MasterLeases),
	).Commit()
	if err != nil {
		return nil, err
	}
	result := func(i int) []*mvccpb.KeyValue { return resp.Responses[i].GetResponseRange().Kvs }
	gateways, servers, reports := result(0), result(2), map[string]map[string]int64{}
	for _, kv := range result(1) {
		var report registryv1.GatewaysRequest
		if err := proto.Unmarshal(kv.Value, &report); err == nil {
			reports[path.Base(string(kv.Key))] = report.Establishing
		}
	}
	addresses, count, lowest := map[string]bool{}, map[string]int{}, map[string]int64{}
	for _, kv := range gateways {
		addresses[string(kv.Value)] = true
		for name, revision := range reports[path.Base(string(kv.Key))] {
			if count[name]++; count[name] == 1 || revision < lowest[name] {
				lowest[name] = revision
			}
		}
	}
	if slices.ContainsFunc(servers, func(kv *mvccpb.KeyValue) bool { return !addresses[path.Base(string(kv.Key))] }) {
		return nil, nil
	}
	maps.DeleteFunc(lowest, func(name string, _ int64) bool { return count[name] < len(gateways) })
	return lowest, nil
}
