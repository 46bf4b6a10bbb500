package main

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// scale scales a Deployment again and again, and waits until kube-controller-manager has made exactly its pods.
func (w *workload) scale(ctx context.Context) {
	config := rest.CopyConfig(w.config)
	config.Timeout = callTimeout
	client := kubernetes.NewForConfigOrDie(config)
	labels := map[string]string{"app": "scaled"}
	deployment := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "scaled"},
		Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			},
		},
	}
	// apply brings the Deployment to n replicas, or returns an error.
	apply := func(n int32) error {
		deployment.Spec.Replicas = ptr.To(n)
		have, err := client.AppsV1().Deployments(namespace).Get(ctx, deployment.Name, metav1.GetOptions{})
		if err != nil {
			_, err = client.AppsV1().Deployments(namespace).Create(ctx, deployment, metav1.CreateOptions{})
			return err
		}
		have.Spec.Replicas = deployment.Spec.Replicas
		_, err = client.AppsV1().Deployments(namespace).Update(ctx, have, metav1.UpdateOptions{})
		return err
	}
	// converged returns an error unless the pods and the Deployment's status have n replicas.
	converged := func(n int32) error {
		pods, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=scaled"})
		if err != nil {
			return err
		}
		have, err := client.AppsV1().Deployments(namespace).Get(ctx, deployment.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if s := have.Status; len(pods.Items) != int(n) || s.Replicas != n || s.ObservedGeneration < have.Generation {
			return fmt.Errorf("a Deployment of %d replicas has %d pods and %d replicas in its status",
				n, len(pods.Items), s.Replicas)
		}
		return nil
	}
	for n := int32(1); ctx.Err() == nil; n = n%8 + 1 {
		for began := time.Now(); apply(n) != nil && ctx.Err() == nil && time.Since(began) < scaleTimeout; {
			time.Sleep(100 * time.Millisecond)
		}
		err := converged(n)
		for began := time.Now(); err != nil && ctx.Err() == nil && time.Since(began) < scaleTimeout; {
			time.Sleep(100 * time.Millisecond)
			err = converged(n)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			w.complain("after %s, %v", scaleTimeout, err)
			continue
		}
		w.scaled.Add(1)
		time.Sleep(time.Second)
	}
}

// scaleTimeout bounds the time until a Deployment has its pods. A controller waits for a minute at most after failures.
const scaleTimeout = 2 * time.Minute
