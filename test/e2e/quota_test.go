package e2e

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
)

// TestAQuotaHoldsWithTwoReplicas checks that concurrent creates do not exceed a quota with two admission replicas.
func TestAQuotaHoldsWithTwoReplicas(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	s.Scale("admission=2")
	const most, tries = 40, 100
	quotas := s.Client().CoreV1().ResourceQuotas("default")
	hard := corev1.ResourceList{"count/configmaps": resource.MustParse(fmt.Sprint(most))}
	q, err := quotas.Create(t.Context(), &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "q"},
		Spec:       corev1.ResourceQuotaSpec{Hard: hard},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// kube-controller-manager would set this status
	q.Status = corev1.ResourceQuotaStatus{
		Hard: hard,
		Used: corev1.ResourceList{"count/configmaps": resource.MustParse("0")},
	}
	if _, err := quotas.UpdateStatus(t.Context(), q, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	create := func(namespace, name string, dry ...string) error {
		_, err := s.Client().CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: name},
		}, metav1.CreateOptions{DryRun: dry})
		return err
	}
	// A replica that has not read a quota admits every object, as kube-apiserver does. A second quota, of zero objects
	// in another namespace, is younger than the first. A replica that enforces it has therefore read both.
	s.Kubectl("create", "namespace", "full")
	s.Apply(
		`{apiVersion: v1, kind: ResourceQuota, metadata: {name: q, namespace: full}, ` +
			`spec: {hard: {count/configmaps: "0"}}}`,
	)
	s.Kubectl("-n", "full", "patch", "quota", "q", "--subresource=status", "--type=merge", "-p",
		`{"status":{"hard":{"count/configmaps":"0"},"used":{"count/configmaps":"0"}}}`)
	refusals := 0
	harness.Eventually(t, harness.Soon, func() error {
		if refusals++; create("full", "none", metav1.DryRunAll) == nil {
			refusals = 0
		}
		if refusals < 20 { // each replica has answered some of them
			return errors.New("a replica has not read the quotas")
		}
		return nil
	})
	var made, refused, unknown atomic.Int32
	var wg sync.WaitGroup
	for n := range tries {
		wg.Go(func() {
			err := create("default", fmt.Sprintf("c-%d", n))
			for apierrors.IsConflict(err) { // the quota changed too often meanwhile, as with several kube-apiservers
				err = create("default", fmt.Sprintf("c-%d", n))
			}
			switch {
			case err == nil:
				made.Add(1)
			case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"):
				refused.Add(1)
			case harness.UnknownResult(err): // the object may be there, and the quota may count it
				unknown.Add(1)
			default:
				t.Errorf("%v", err)
			}
		})
	}
	wg.Wait()
	q, err = quotas.Get(t.Context(), "q", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all, err := s.Client().CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	used := q.Status.Used["count/configmaps"]
	for name, n := range map[string]int{
		"made": int(made.Load()), "not refused": tries - int(refused.Load()), "there": len(all.Items),
		"used": int(used.Value()),
	} {
		if spare := int(unknown.Load()); n > most+spare || n < most-spare || n > most && name != "not refused" {
			t.Errorf("%d are %s of %d; %d results are unknown", n, name, most, spare)
		}
	}
}
