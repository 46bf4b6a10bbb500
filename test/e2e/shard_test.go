package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/test/harness"
)

// shardOf returns a shard selector with hexadecimal hashes, for a query.
func shardOf(field, start, end string) string {
	return url.QueryEscape(fmt.Sprintf("shardRange(object.metadata.%s, '0x%s', '0x%s')", field, start, end))
}

// TestShardsAreThoseOfKubeAPIServer checks lists and watches with a shardSelector against kube-apiserver on the same
// etcd, with the feature gate on. A deletecollection deletes only its shard.
func TestShardsAreThoseOfKubeAPIServer(t *testing.T) {
	t.Parallel()
	const gate = "--feature-gates=ShardedListAndWatch=true"
	dir := harness.TempDir(t)
	reference := harness.KubeAPIServer(t, dir, harness.Etcd(t, dir), gate, "--advertise-address=192.0.2.9")
	theirs, ours := reference.Server, reference.Beside("", gate)
	const half, all = "8000000000000000", "10000000000000000"
	low, high := shardOf("uid", "0000000000000000", half), shardOf("uid", half, all)
	const ns = "shard"
	// Processes of kubectl would create the 33 objects more slowly.
	client, create := theirs.Client().CoreV1(), metav1.CreateOptions{FieldManager: "kubectl-create"}
	for _, ns := range []string{ns, ns + "-2", ns + "-3"} {
		harness.Write(t, func() error {
			_, err := client.Namespaces().Create(t.Context(), &corev1.Namespace{
				ObjectMeta: metav1.ObjectMeta{Name: ns}}, create)
			return err
		})
		for i := range 8 {
			m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c", i)}}
			m.Data = map[string]string{"k": "v"}
			harness.Write(t, func() error {
				_, err := client.ConfigMaps(ns).Create(t.Context(), m, create)
				return err
			})
		}
	}
	revision := theirs.Kubectl("get", "namespace", ns, "-o", "jsonpath={.metadata.resourceVersion}")
	theirs.Kubectl("label", "configmaps", "--all", "-n", ns, "a=b")
	theirs.Kubectl("delete", "configmap", "c6", "c7", "-n", ns)
	theirs.Apply(`{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition,
metadata: {name: shards.e2e.example.com}, spec: {group: e2e.example.com, scope: Cluster,
names: {plural: shards, kind: Shard}, versions: [{name: v1, served: true, storage: true,
schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]}}`)
	theirs.Kubectl("wait", "--timeout=2m", "--for=jsonpath={.status.acceptedNames.kind}=Shard",
		"crd/shards.e2e.example.com")
	theirs.Kubectl("wait", "--timeout=2m", "--for=condition=Established", "crd/shards.e2e.example.com")
	shards := dynamicFor(t, theirs).Resource(schema.GroupVersionResource{
		Group: "e2e.example.com", Version: "v1", Resource: "shards"})
	for i := range 6 {
		shard := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "e2e.example.com/v1", "kind": "Shard",
			"metadata": map[string]any{"name": fmt.Sprint("s", i)}}}
		harness.Write(t, func() error {
			_, err := shards.Create(t.Context(), shard, create)
			return err
		})
	}
	for _, s := range []*harness.Server{ours, theirs} {
		harness.Eventually(t, harness.Soon, func() error { // the last writes are in the caches
			code, body := s.Get("/apis/e2e.example.com/v1/shards?resourceVersion=0")
			maps, left := s.Get("/api/v1/namespaces/" + ns + "/configmaps?resourceVersion=0")
			if n := strings.Count(body, `"kind":"Shard"`); code != http.StatusOK || n != 6 {
				return fmt.Errorf("%d, %d shards", code, n)
			}
			if maps != http.StatusOK || strings.Contains(left, `"name":"c7"`) {
				return fmt.Errorf("%d %s", maps, left)
			}
			return nil
		})
	}
	const (
		table    = "application/json;as=Table;v=v1;g=meta.k8s.io"
		metadata = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
		initial  = "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true" +
			"&timeoutSeconds=5&shardSelector="
	)
	const maps = "/api/v1/namespaces/" + ns + "/configmaps"
	since := "?watch=1&timeoutSeconds=5&resourceVersion=" + revision + "&shardSelector="
	const widgets = "/apis/e2e.example.com/v1/shards"
	token := regexp.MustCompile(`"continue":"[^"]+"`)
	var wg sync.WaitGroup
	masked := strings.NewReplacer("…]", "0]", "…", `"":0`) // an age ends the cells of a row
	slots := make(chan struct{}, 8)
	// get returns the answer without its token. Its objects have their keys in alphabetical order.
	get := func(s *harness.Server, path, accept string) answer {
		a := ask(t, s, "GET", path, accept)
		if a.failed {
			return a
		}
		var sorted []byte
		for d := json.NewDecoder(strings.NewReader(masked.Replace(a.body))); ; {
			var object any
			if err := d.Decode(&object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Errorf("%s (%s): %v: %s", path, accept, err, a.body)
				break
			}
			line, err := json.Marshal(object)
			if err != nil {
				t.Error(err)
			}
			if bytes.Contains(line, []byte(`"BOOKMARK"`)) && !bytes.Contains(line, []byte("initial-events-end")) {
				continue // a server sends it at a time of its own
			}
			sorted = append(append(sorted, line...), '\n')
		}
		a.body = token.ReplaceAllString(string(sorted), "")
		return a
	}
	compare := func(path, accept string) {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			compareRound(t, path, func() error {
				got := both([2]*harness.Server{ours, theirs}, func(_ int, s *harness.Server) answer {
					return get(s, path, accept)
				})
				if differ(got[0], got[1]) {
					return fmt.Errorf("%s (%s)\nkube-apiserver: %+v\nwatershed:      %+v", path, accept, got[1], got[0])
				}
				return nil
			})
		})
	}
	for _, shard := range []string{low, high, low + url.QueryEscape(" || ") + high,
		shardOf("namespace", "0000000000000000", half), shardOf("namespace", half, all)} {
		for _, path := range []string{maps, "/api/v1/configmaps", "/api/v1/namespaces", widgets} {
			for _, query := range []string{"", "limit=1&", "limit=3&", "resourceVersion=0&", "pretty=1&",
				"labelSelector=a%3Db&limit=2&", "resourceVersion=" + revision + "&resourceVersionMatch=Exact&"} {
				if strings.Contains(query, "Exact") && path == widgets {
					continue // the resource did not exist
				}
				compare(path+"?"+query+"shardSelector="+shard, "")
			}
			for _, accept := range []string{table, metadata} {
				compare(path+"?shardSelector="+shard, accept)
			}
			if path != "/api/v1/namespaces" { // its bookmark has an empty spec and status in kube-apiserver
				compare(path+initial+shard, "")
			}
		}
		compare(maps+since+shard, "")
		compare(maps+since+shard+"&labelSelector=a%3Db", "")
		compare(maps+"/c1?shardSelector="+shard, "")
		compare(maps+"?fieldSelector=metadata.name%3Dc1&shardSelector="+shard, "")
	}
	for _, bad := range []string{"+", "a", "a(", "shardRange(1)", "shardRange(object.metadata.name,'0x0','0x1')",
		"shardRange(object.metadata.uid,'0x0','0x1')", "shardRange(object.metadata.uid,'1','0x1')",
		"shardRange(object.metadata.uid,'0x" + half + "','0x" + half + "')",
		"shardRange(object.metadata.uid,'0x" + half + "','0x20000000000000000')",
		"shardRange(object.metadata.uid,'0x0000000000000000','0x" + all + "')||shardRange(object.metadata.namespace," +
			"'0x0000000000000000','0x" + all + "')"} {
		for _, query := range []string{"", "pretty=1&", "watch=1&timeoutSeconds=3&", "fieldSelector=a%3Db&",
			"resourceVersion=x&", "watch=1&resourceVersion=x&"} {
			compare(maps+"?"+query+"shardSelector="+strings.ReplaceAll(url.QueryEscape(bad), "%2B", "+"), "")
		}
	}
	wg.Wait()
	count := func(s *harness.Server, shard string) int {
		selector, err := url.QueryUnescape(shard)
		if err != nil {
			t.Fatal(err)
		}
		list, err := s.Client().CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{ShardSelector: selector})
		if err != nil || list.ShardInfo == nil || list.ShardInfo.Selector != selector {
			t.Fatalf("%+v, %v", list, err)
		}
		return len(list.Items)
	}
	kept := count(theirs, high)
	if a := ask(t, ours, "DELETE", maps+"?shardSelector="+low, ""); !a.failed && a.code != 200 {
		t.Error(a)
	}
	for _, s := range []*harness.Server{ours, theirs} {
		if l, h := count(s, low), count(s, high); l != 0 || h != kept {
			t.Errorf("after a deletecollection, the shards have %d and %d objects; kept: %d", l, h, kept)
		}
	}
}
