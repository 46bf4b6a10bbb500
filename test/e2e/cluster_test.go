package e2e

import (
	"fmt"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

const workloads = `
apiVersion: v1
kind: Namespace
metadata: {name: work}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: work}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template: {metadata: {labels: {app: web}}, spec: {containers: [{name: c, image: nginx}]}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db, namespace: work}
spec:
  replicas: 2
  serviceName: db
  selector: {matchLabels: {app: db}}
  template: {metadata: {labels: {app: db}}, spec: {containers: [{name: c, image: postgres}]}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: once, namespace: work}
spec:
  completions: 2
  template: {spec: {restartPolicy: Never, containers: [{name: c, image: busybox}]}}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: work}
spec: {selector: {app: web}, ports: [{port: 80}]}
`

// workloadsComeTo runs kube-controller-manager, kube-scheduler and kwok against s until every workload is ready.
func workloadsComeTo(t *testing.T, s *harness.Server) {
	t.Helper()
	s.Controllers()
	s.Apply(workloads)
	is := func(object, path, want string) {
		t.Helper()
		harness.Eventually(t, harness.Soon, func() error {
			out, err := s.TryKubectl("", "get", "-n", "work", object, "-o", "jsonpath="+path)
			if err != nil || out != want {
				return fmt.Errorf("%s %s is %q, not %q (%v)", object, path, out, want, err)
			}
			return nil
		})
	}
	is("deployment/web", "{.status.readyReplicas}", "3")
	is("statefulset/db", "{.status.readyReplicas}", "2")
	is("job/once", "{.status.succeeded}", "2")
	harness.Eventually(t, harness.Soon, func() error {
		out, err := s.TryKubectl("", "get", "endpointslices", "-n", "work", "-l", "kubernetes.io/service-name=web",
			"-o", "jsonpath={.items[*].endpoints[*].addresses}")
		if err != nil || strings.Count(out, "[") != 3 {
			return fmt.Errorf("the service's endpoints are %q (%v)", out, err)
		}
		return nil
	})
	s.Kubectl("delete", "namespace", "work", "--timeout=90s")
	if out, err := s.TryKubectl("", "get", "namespace", "work"); err == nil {
		t.Errorf("the namespace is still there: %s", out)
	}
}

func TestControllersWorkOnUp(t *testing.T) {
	t.Parallel()
	workloadsComeTo(t, harness.Up(t, ""))
}

// TestEtcdIsKubeAPIServersBothWays checks that Watershed starts on an etcd that kube-apiserver filled. kube-apiserver
// then starts on the same etcd.
func TestEtcdIsKubeAPIServersBothWays(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	etcd := harness.Etcd(t, dir)
	before := harness.KubeAPIServer(t, dir, etcd)
	before.Kubectl("create", "configmap", "theirs", "--from-literal=by=kube-apiserver")
	before.Kubectl("create", "serviceaccount", "robot")
	before.Kubectl("create", "service", "clusterip", "svc", "--tcp=80")
	address := before.Kubectl("get", "service", "svc", "-o", "jsonpath={.spec.clusterIP}")
	roles := before.Kubectl("get", "clusterroles", "-o", "name")
	before.Stop()

	ours := harness.Up(t, "", "--etcd-servers="+etcd)
	contains(t, "their object", ours.Kubectl("get", "configmap", "theirs", "-o", "jsonpath={.data.by}"),
		"kube-apiserver")
	if got := ours.Kubectl("get", "service", "svc", "-o", "jsonpath={.spec.clusterIP}"); got != address {
		t.Errorf("the service's address was %s and is %s", address, got)
	}
	if got := ours.Kubectl("get", "clusterroles", "-o", "name"); got != roles {
		t.Errorf("cluster roles differ:\n%s\n%s", roles, got)
	}
	ours.Kubectl("create", "configmap", "ours", "--from-literal=by=watershed")
	ours.Kubectl("create", "service", "clusterip", "svc2", "--tcp=80")
	ours.Kubectl("label", "configmap", "theirs", "seen=yes")
	second := ours.Kubectl("get", "service", "svc2", "-o", "jsonpath={.spec.clusterIP}")
	if second == address {
		t.Errorf("both services have %s", address)
	}
	ours.Stop()

	after := harness.KubeAPIServer(t, dir, etcd)
	contains(t, "our object", after.Kubectl("get", "configmap", "ours", "-o", "jsonpath={.data.by}"), "watershed")
	contains(t, "our label", after.Kubectl("get", "configmap", "theirs", "-o", "jsonpath={.metadata.labels.seen}"),
		"yes")
	if got := after.Kubectl("get", "service", "svc2", "-o", "jsonpath={.spec.clusterIP}"); got != second {
		t.Errorf("the second service's address was %s and is %s", second, got)
	}
}
